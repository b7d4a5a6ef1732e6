"""The page on serving says what was recorded."""

from __future__ import annotations

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
