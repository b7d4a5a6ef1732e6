"""The page that compares objectives shows the recorded figures, and its benchmark runs."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield import_module("pretrained")
    for name in ("pretrained", "record"):
        sys.modules.pop(name, None)


def test_the_page_is_written_from_the_recorded_figures(benchmark: Any) -> None:
    figures = json.loads((BENCHMARKS / "results" / "pretrained.json").read_text())
    assert benchmark.PAGE.read_text("utf-8") == benchmark.page(figures)


@pytest.mark.parametrize("name", ["end_to_end", "balcony"])
def test_an_arm_of_the_benchmark_runs_on_a_tiny_model(benchmark: Any, name: str) -> None:
    found = benchmark.arm(name, 1.0, None, True)
    assert found["steps"] == 2
    assert len(found["nll"]) == 4
    assert all(depth["same_tokens"] for depth in found["drafting"].values())
