"""What a report shows of ablations, gradient studies and trainings that were watched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.zoo import ENTRIES
from torch import Tensor

import everydepth as ed
from everydepth.ablations import (
    GradientStudy,
    GradientWatch,
    Memorization,
)
from everydepth.data import flip_labels
from everydepth.reports.cards import card
from everydepth.reports.reading import read
from everydepth.reports.words import by_depth
from everydepth.results import Results
from everydepth.results.figures.kinds import charts


def shown(found: Results) -> Results:
    """The same, once everything can be drawn or read."""
    for result in found.results.values():
        assert not any("could not be drawn" in note for note in card({"a": result}).notes)
    return found


@pytest.fixture(scope="module")
def studied() -> dict[str, Results]:
    torch.manual_seed(0)
    model, batch = ENTRIES["ViT"].make()
    batch = {key: torch.cat([value] * 4) for key, value in batch.items()}
    count = len(batch["pixel_values"])
    batch["labels"] = torch.arange(count) % 10
    noise = flip_labels(batch["labels"], 0.5, classes=10)
    noisy = {**batch, "labels": noise.labels}
    study = ed.gradient_study(model, batch, noisy, flipped=noise, progress=False)
    after = ed.ablate(model, batch, c=(0.0, 1.0), progress=False)
    found = ed.memorization(model, noisy, batch, flipped=noise, progress=False)
    return {"ablation": after, "study": study, "memorization": found}


def test_an_ablation_shows_accuracy_and_margin_per_layer(studied: dict[str, Results]) -> None:
    found = shown(studied["ablation"])
    assert {"accuracy", "margin", "agreement"} <= set(found)
    (chart,) = charts({"": found.result("margin")})
    assert [mark.name for mark in chart.marks] == ["c = 0", "c = 1"]  # pyright: ignore[reportAttributeAccessIssue]
    assert found.table("accuracy").headings == ("layer", "c = 0", "c = 1")
    assert by_depth(found.result("accuracy"))[0] == "undefined here"
    assert "c = 0" in by_depth(found.result("accuracy"))[1]


def test_a_study_shows_norms_and_spreads(studied: dict[str, Results], tmp_path: Path) -> None:
    found = shown(studied["study"])
    assert {"gradient_norm", "gradient_ratio", "stream_std", "weight_std"} <= set(found)
    assert found.result("gradient_norm").series == ("learning", "memorization")
    again = GradientStudy.load(found.save(tmp_path / "study"))
    assert isinstance(found, GradientStudy)
    np.testing.assert_array_equal(again.learning.norms["mlp"], found.learning.norms["mlp"])


def test_memorized_labels_are_shown_by_depth(studied: dict[str, Results]) -> None:
    found = shown(studied["memorization"])
    assert isinstance(found, Memorization)
    assert len(found["by_depth"]) == len(found["test_by_depth"]) == 5
    assert found["by_depth"][-1] == found.memorization
    assert "(100 % not reached)" in found.table().title


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
    found = read(tmp_path / "run").answers["training"]
    for side in ("learning", "memorization"):
        norms = found.result(f"watch.{side}_norm")
        assert norms.arrays["columns"].tolist() == [1, 2, 3]  # an early, a middle, a late layer
        assert norms.x().tolist() == [1, 2, 3]  # after every epoch of one step
    assert {"watch.learning_margin", "watch.memorization", "watch.train_accuracy"} <= set(found)
