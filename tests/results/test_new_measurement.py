"""A measurement from outside appears everywhere without a line in any surface."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tests.helpers import tracing as samples

import everydepth as ed
from everydepth.app import measured
from everydepth.app.shelf import shelf_of
from everydepth.cli.showing import show
from everydepth.results import Result
from everydepth.runs import Run
from everydepth.tracing import BatchMetric, Observation, metric


class Warmth(BatchMetric):
    name = "warmth"
    title = "Warmth of the stream"
    about = "The largest entry of each state; a warm stream may overflow in half precision."
    unit = "°C"
    better = "lower"
    section = "weather"

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def update(self, observation: Observation) -> None:
        self.seen.append(torch.stack([h.abs().max() for h in observation.states.h]))

    def compute(self) -> Result:
        value = torch.stack(self.seen).amax(0).numpy()
        arrays = {"depth": np.arange(len(value)), "value": value}
        return Result(name=self.name, kind="curve", series=("value",), arrays=arrays)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> ed.Trace:
    monkeypatch.setattr(metric, "_registry", dict(metric._registry))  # pyright: ignore[reportPrivateUsage]
    ed.register_metric(Warmth)
    return ed.trace(samples.vit(), samples.pictures(12), ["accuracy", "warmth"], progress=False)


def test_a_metric_of_ones_own_is_in_table_figure_page_app_terminal_and_json(
    traced: ed.Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "runs" / "mine", {}).path
    traced.save(run / "trace")

    last = float(traced["warmth"][-1])
    assert traced.table().heads == ("depth", "accuracy", "warmth (°C)")
    assert traced.table("warmth").column("warmth")[-1] == pytest.approx(last)
    assert "| depth | warmth (°C) |" in traced.table("warmth").markdown()

    axes = traced.plot("warmth").axes[0]
    assert (axes.get_title(), axes.get_ylabel()) == (Warmth.title, "warmth of the stream (°C)")
    titles = [note.text for note in traced.figure(backend="plotly").layout.annotations]
    assert titles == ["Accuracy", Warmth.title]

    page = ed.report(run, tmp_path / "page.html").read_text()
    assert all(text in page for text in (Warmth.title, Warmth.about, "Weather"))

    tab = measured.answers(shelf_of(tmp_path / "runs"), "mine")["trace"]
    assert Warmth.about in measured.words(tab, "warmth")
    assert measured.figure(tab, "warmth").data[0].y[-1] == pytest.approx(last, rel=1e-5)

    show(traced, Console())
    assert "warmth (°C)" in capsys.readouterr().out

    content = json.loads(json.dumps(traced.to_json()))
    (found,) = [one for one in content["results"] if one["name"] == "warmth"]
    assert found["arrays"]["value"][-1] == pytest.approx(last)
    assert (found["about"], found["unit"], found["better"]) == (Warmth.about, "°C", "lower")
