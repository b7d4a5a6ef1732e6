"""The page on serving says what was recorded."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def test_the_tables_of_the_page_are_those_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    serving: Any = import_module("serving")
    found = serving.recorded_everywhere("serving")
    assert len(found) > 0
    assert serving.page(found) in (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


def test_what_the_page_says_of_replicas_is_what_was_recorded() -> None:
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8").replace("\n", " ")
    found = json.loads((ROOT / "benchmarks" / "results" / "replicas.json").read_text())
    idle, exchanged, killed = found["meanwhile"].values()
    for one in (exchanged, killed):
        assert f"{one['answers']['200']} of {one['requests']}" in text
    assert f"less than {idle['p50_seconds']:.1f} s" in text
    assert f"around the `kill -9` {killed['slowest_seconds']:.1f} s" in text
