"""What a report shows of ablations, gradient studies and trainings that were watched."""

from __future__ import annotations

import json
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
from everydepth.report.cards import card
from everydepth.report.reading import read
from everydepth.report.words import by_depth
from everydepth.results import Results
from everydepth.results.earlier import converted
from everydepth.results.figures.kinds import charts


def shown(name: str, content: Any) -> Results:
    """What a report shows of it; everything can be drawn or read."""
    found = converted(name, json.loads(json.dumps(content)), Path())
    assert found is not None
    for result in found.results.values():
        assert not any("could not be drawn" in note for note in card({"a": result}).notes)
    return found


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
    found = shown("ablation", studied["ablation"])
    assert {"accuracy", "margin", "agreement"} <= set(found)
    expected = np.array(studied["ablation"]["runs"]["margin"])[0]
    np.testing.assert_allclose(found["margin"], expected)
    (chart,) = charts({"": found.result("margin")})
    assert [mark.name for mark in chart.marks] == ["c = 0", "c = 1"]  # pyright: ignore[reportAttributeAccessIssue]
    assert found.table("accuracy").headings == ("layer", "0", "1")
    assert by_depth(found.result("accuracy"))[0] == "not defined here"
    assert "c = 0" in by_depth(found.result("accuracy"))[1]


def test_a_study_shows_norms_bound_and_spreads(studied: dict[str, Any]) -> None:
    found = shown("gradient_study", studied["gradient_study"])
    assert list(found) == [
        "gradient_norms",
        "bound_attention",
        "bound_mlp",
        "stream_std",
        "weight_std",
    ]
    assert found.result("gradient_norms").series == ("learning", "memorization")
    bound = found.result("bound_attention")
    assert bound.series == ("measured", "corrected", "as_printed", "repaired")
    assert (bound.arrays["measured"] <= bound.arrays["repaired"]).all()


def test_the_scatter_has_one_dot_a_layer(studied: dict[str, Any]) -> None:
    found = shown("unified_view", studied["unified_view"])
    assert [len(found[name]) for name in found] == [4, 4]
    (chart,) = charts({"": found.result("margin_against_gradient")})
    (dots,) = chart.marks
    assert dots.text == ("layer 1", "layer 2", "layer 3", "layer 4")  # pyright: ignore[reportAttributeAccessIssue]


def test_memorized_labels_are_shown_by_depth(studied: dict[str, Any]) -> None:
    result = shown("memorization", studied["memorization"]).result("memorization")
    (chart,) = charts({"": result})
    assert [mark.name for mark in chart.marks] == ["memorized labels", "right on clean data"]  # pyright: ignore[reportAttributeAccessIssue]
    assert result.note is not None
    assert "not reached" in result.note


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


def test_a_watch_that_never_looked_says_so() -> None:
    found = shown("GradientWatch", {"epochs": []})
    assert found.result("gradient_norms").note == "no epoch was looked at"
