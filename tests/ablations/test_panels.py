"""What a report shows of ablations, gradient studies and trainings that were watched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.zoo import ENTRIES
from torch import Tensor

import everydepth as ed
from everydepth.ablations import GradientWatch
from everydepth.data import flip_labels
from everydepth.report import ablations  # noqa: F401 - registers the panels
from everydepth.report.panels import Panel, draw
from everydepth.report.reading import read
from everydepth.results.figures.chart import Line


def drawn(name: str, **runs: Any) -> Panel:
    found = draw(name, runs)
    assert found is not None
    assert not any("could not be drawn" in note for note in found.notes), found.notes
    return found


def labels_of(panel: Panel) -> list[str]:
    return [chart.y.label for chart in panel.charts]


@pytest.fixture(scope="module")
def studied() -> dict[str, Any]:
    torch.manual_seed(0)
    model, batch = ENTRIES["ViT"].make()
    batch = {key: torch.cat([value] * 4) for key, value in batch.items()}
    count = len(batch["pixel_values"])
    batch["labels"] = torch.arange(count) % 10
    noise = flip_labels(batch["labels"], 0.5, classes=10)
    noisy = {**batch, "labels": noise.labels}
    study = ed.gradient_study(model, batch, noisy, flipped=noise, progress=False)
    after = ed.ablate(model, batch, c=(0.0, 1.0), progress=False)
    return {
        "ablation": after.to_json(),
        "gradient_study": study.to_json(),
        "unified_view": ed.unified_view(study, after).to_json(),
        "memorization": ed.memorization(
            model, noisy, batch, flipped=noise, progress=False
        ).to_json(),
    }


def test_an_ablation_shows_accuracy_and_margin_per_layer(studied: dict[str, Any]) -> None:
    panel = drawn("ablation", a=studied["ablation"])
    assert {"Accuracy", "Margin", "Agreement"} <= set(labels_of(panel))
    line = panel.charts[labels_of(panel).index("Margin")].marks[0]
    assert isinstance(line, Line)
    np.testing.assert_allclose(line.y, np.array(studied["ablation"]["runs"]["margin"])[0, :, 0])


def test_a_study_shows_norms_bound_and_spreads(studied: dict[str, Any]) -> None:
    panel = drawn("gradient_study", a=studied["gradient_study"])
    assert labels_of(panel) == [
        "‖gradient of the loss‖",
        "‖gradient‖ at attention and its bound",
        "‖gradient‖ at mlp and its bound",
        "std of the stream",
        "std of weights",
    ]
    assert [mark.name for mark in panel.charts[0].marks] == ["learning", "memorization"]
    bound = {mark.name: mark.y for mark in panel.charts[1].marks if isinstance(mark, Line)}
    assert list(bound) == ["measured", "corrected", "as printed", "repaired"]
    assert (bound["measured"] <= bound["repaired"]).all()


def test_the_scatter_has_one_dot_a_layer(studied: dict[str, Any]) -> None:
    panel = drawn("unified_view", a=studied["unified_view"])
    assert [len(chart.marks[0].x) for chart in panel.charts] == [4, 4]  # pyright: ignore[reportAttributeAccessIssue]


def test_memorised_labels_are_shown_by_depth(studied: dict[str, Any]) -> None:
    panel = drawn("memorization", a=studied["memorization"])
    assert [mark.name for mark in panel.charts[0].marks] == [
        "memorised labels",
        "right on clean data",
    ]
    assert "not reached" in panel.notes[0]


def test_a_watched_training_shows_its_epochs(tmp_path: Path) -> None:
    from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig

    torch.manual_seed(0)
    model = ResidualMLP(
        ResidualMLPConfig(num_outputs=3, num_hidden_layers=3, hidden_size=8, regression=False)
    )
    x = torch.randn(24, 2)
    clean: dict[str, Tensor] = {"inputs": x, "labels": (x[:, 0] > 0).long()}
    noise = flip_labels(clean["labels"], 0.25, classes=3)
    noisy = {**clean, "labels": noise.labels}
    watch = GradientWatch(clean, noisy, flipped=noise)
    ed.fit(
        ed.EveryDepth(model, ed.end_to_end()),
        [noisy],
        epochs=3,
        run=tmp_path / "run",
        callbacks=[watch],
        progress=False,
    )
    view = read(tmp_path / "run")
    panel = drawn("GradientWatch", a=view.results["GradientWatch"])
    assert labels_of(panel) == ["‖gradient of the loss‖", "margin", "prediction error", "share"]
    norms = panel.charts[0].marks
    assert len(norms) == 6  # an early, a middle and a late layer, of both sides
    assert all(list(mark.x) == [1, 2, 3] for mark in norms)  # pyright: ignore[reportAttributeAccessIssue]


def test_a_watch_that_never_looked_says_so() -> None:
    panel = drawn("GradientWatch", a={"epochs": []})
    assert panel.notes == ("a: no epoch was looked at",)
