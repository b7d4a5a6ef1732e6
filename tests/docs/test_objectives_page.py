"""The page that compares objectives shows the recorded figures, and its benchmark runs."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from everydepth.app.shelf import shelf_of
from everydepth.reports.reading import read

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield import_module("pretrained")
    for name in ("pretrained", "record"):
        sys.modules.pop(name, None)


@pytest.fixture
def figures() -> Any:
    return json.loads((BENCHMARKS / "results" / "pretrained.json").read_text())


def test_the_page_is_written_from_the_recorded_figures(benchmark: Any, figures: Any) -> None:
    assert benchmark.PAGE.read_text("utf-8") == benchmark.page(figures)


def test_the_figures_are_runs_that_the_app_finds(
    benchmark: Any, figures: Any, tmp_path: Path
) -> None:
    benchmark.as_runs(figures, tmp_path)
    assert set(shelf_of(tmp_path).runs()) == set(figures["models"])
    rows = read(tmp_path / "stories15M").answers["sweep"].rows()
    seeds = figures["models"]["stories15M"]["arms"]["lpa"]
    last = [row for row in rows if row["objective"] == "lpa"][-1]
    assert last["nll"] == pytest.approx(sum(row["nll"][-1] for row in seeds) / len(seeds))


@pytest.mark.parametrize("name", ["end_to_end", "balcony", "lora"])
def test_an_arm_of_the_benchmark_runs_on_a_tiny_model(benchmark: Any, name: str) -> None:
    found = benchmark.arm("tiny", name, 1.0, 0, None, None)
    assert found["steps"] == 2
    assert found["blocks"] == [2, 3, 5, 6]
    assert len(found["nll"]) == 4
    assert all(depth["same_tokens"] for depth in found["drafting"].values())


def test_blocks_that_are_chosen_have_a_loss_at_each_rung_alone(benchmark: Any) -> None:
    found = benchmark.arm("tiny", benchmark.CHOSEN, 1.0, 0, None, None)
    assert [loss is not None for loss in found["nll"]] == [True, True, True, False]
    assert found["steps"] == 6


def test_a_rate_that_costs_the_last_depth_too_much_is_not_chosen(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = [0.0]
    # By rate: loss of the rung, and of the last depth, which was 1.
    after = {0.0: [5.0, 1.0], 1.0: [4.0, 1.005], 2.0: [3.0, 1.009], 3.0: [2.0, 1.02]}

    def trained(net: Any, texts: Any, steps: int, lr: float, seed: int) -> None:
        rate[0] = lr

    def judged(net: Any, texts: Any, depths: Any) -> list[float]:
        return after[rate[0]] if len(depths) > 1 else [1.0]

    monkeypatch.setattr(benchmark, "tuned", trained)
    monkeypatch.setattr(benchmark, "nll", judged)
    text = benchmark.Text(train=None, valid=None, held_out=None)
    made = lambda: benchmark.tiny()  # noqa: E731
    assert benchmark.rate_for(made, (1.0, 2.0, 3.0), text, 8, (2,)) == 2.0
    after[1.0][1] = after[2.0][1] = 1.5
    assert benchmark.rate_for(made, (1.0, 2.0, 3.0), text, 8, (2,)) == 1.0
