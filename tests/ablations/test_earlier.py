"""What a report shows of ablations, gradient studies and trainings that were watched."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.zoo import ENTRIES
from torch import Tensor

import everydepth as ed
from everydepth.ablations import (
    Ablation,
    GradientStudy,
    GradientWatch,
    Memorization,
    unified_view,
)
from everydepth.data import flip_labels
from everydepth.reports.cards import card
from everydepth.reports.reading import read
from everydepth.reports.words import by_depth
from everydepth.results import Results
from everydepth.results.earlier import converted
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
    view = unified_view(study, after)
    return {"ablation": after, "study": study, "view": view, "memorization": found}


def test_an_ablation_shows_accuracy_and_margin_per_layer(studied: dict[str, Results]) -> None:
    found = shown(studied["ablation"])
    assert {"accuracy", "margin", "agreement"} <= set(found)
    (chart,) = charts({"": found.result("margin")})
    assert [mark.name for mark in chart.marks] == ["c = 0", "c = 1"]  # pyright: ignore[reportAttributeAccessIssue]
    assert found.table("accuracy").headings == ("layer", "c = 0", "c = 1")
    assert by_depth(found.result("accuracy"))[0] == "undefined here"
    assert "c = 0" in by_depth(found.result("accuracy"))[1]


def test_an_ablation_of_an_earlier_version_loads_as_one(studied: dict[str, Results]) -> None:
    found = studied["ablation"]
    assert isinstance(found, Ablation)
    names = ("model", "task", "mode", "which", "layers", "c", "seeds", "samples")
    content = {name: getattr(found, name) for name in names}
    content |= {
        key: {name: values.tolist() for name, values in getattr(found, key).items()}
        for key in ("runs", "untouched")
    }
    again = converted("ablation", json.loads(json.dumps({"format": 1, **content})), Path())
    assert isinstance(again, Ablation)
    np.testing.assert_array_equal(again["margin"], found["margin"])
    assert (again.layers, again.c, again.which) == (found.layers, found.c, found.which)


def test_a_study_shows_norms_bound_and_spreads(studied: dict[str, Results], tmp_path: Path) -> None:
    found = shown(studied["study"])
    assert {"gradient_norm", "gradient_ratio", "stream_std", "weight_std"} <= set(found)
    assert found.result("gradient_norm").series == ("learning", "memorization")
    bound = found.result("bound_attention")
    assert bound.series == ("measured", "corrected", "as_printed", "repaired")
    assert (bound.arrays["measured"] <= bound.arrays["repaired"]).all()
    again = GradientStudy.load(found.save(tmp_path / "study"))
    assert isinstance(found, GradientStudy)
    np.testing.assert_array_equal(again.learning.norms["mlp"], found.learning.norms["mlp"])
    assert again.bound_is_ordered == found.bound_is_ordered


def test_the_scatter_has_one_dot_a_layer(studied: dict[str, Results]) -> None:
    found = shown(studied["view"])
    (chart,) = charts({"": found.result("margin_against_gradient")})
    (dots,) = chart.marks
    assert dots.text == ("layer 1", "layer 2", "layer 3", "layer 4")  # pyright: ignore[reportAttributeAccessIssue]


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
    found = read(tmp_path / "run").answers["GradientWatch"]
    assert list(found) == ["gradient_norms", "margin", "error", "shares"]
    norms = found.result("gradient_norms")
    assert len(norms.series) == 6  # an early, a middle and a late layer, of both sides
    assert norms.x().tolist() == [1, 2, 3]


def test_a_watch_without_measurements_is_a_gap_with_a_reason() -> None:
    found = converted("GradientWatch", {"epochs": []}, Path())
    assert found is not None
    assert shown(found).result("gradient_norms").note == "no epoch was measured"
