"""The jumpboard: a step that lowers the loss, found in few evaluations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.helpers.growth import labeled, mlp, points
from tests.zoo import ENTRIES
from torch import nn

import everydepth as ed
from everydepth.errors import SettingError
from everydepth.growth import jumpboard, score
from everydepth.growth.jump import line_search
from everydepth.growth.losses import mean_loss

LINES = {
    "parabola": (lambda e: 1 - e + e * e, 1.0),
    "far too small a first step": (lambda e: 1 - 1e-6 * e + 1e-9 * e * e, 1e-6),
    "far too large a first step": (lambda e: 1 - 50 * e + 5e4 * e * e, 50.0),
    "a wall": (lambda e: 1 - e + (0.0 if e < 0.6 else math.inf), 1.0),
    "skewed": (lambda e: math.exp(-2 * e) + 0.3 * e**3, 2.0),
}


@pytest.mark.parametrize("name", LINES)
def test_the_line_search_is_within_two_percent_of_a_grid_of_200(name: str) -> None:
    loss, slope = LINES[name]
    eta, tried = line_search(loss, loss(0.0), slope, 1.0)
    assert len(tried) <= 12
    assert eta > 0
    grid = min(loss(e) for e in np.geomspace(1e-5, 1e5, 200))
    assert loss(0.0) - loss(eta) >= 0.98 * (loss(0.0) - grid) - 1e-12


def test_without_descent_no_step_is_taken() -> None:
    eta, tried = line_search(lambda e: 1 + e, 1.0, 1.0, 1.0)
    assert eta == 0
    assert len(tried) <= 12
    assert line_search(lambda e: 1 - e, 1.0, 0.0, 1.0) == (0.0, [])


@pytest.mark.parametrize("precondition", [False, True])
@pytest.mark.parametrize(
    "name",
    ["CifarResNet-post-pad", "GPT2-CausalLM-left", "Beit-mean-pooling", "CifarResNet-pre-pad"],
)
def test_a_jumpboard_lowers_the_training_loss_by_its_margin(name: str, precondition: bool) -> None:
    model, batch = labeled(ENTRIES[name], torch.float32)
    jump = jumpboard(model, batch, batch, after=2, precondition=precondition)
    assert jump.found
    assert len(jump.tried) <= 12
    assert jump.margin > 0
    assert type(jump.model) is type(model)
    assert ed.as_stream(jump.model).depth == ed.as_stream(model).depth + 1
    gained = mean_loss(model, batch) - mean_loss(jump.model, batch)
    assert jump.margin == pytest.approx(gained, rel=1e-3, abs=1e-6)
    assert jump.margin_valid == pytest.approx(gained, rel=1e-3, abs=1e-6)


def test_preconditioning_gains_more_where_features_differ_in_size() -> None:
    model, batch = labeled(ENTRIES["CifarResNet-post-pad"], torch.float32)
    scored = score(model, batch)
    plain, better = (
        jumpboard(model, batch, after=6, scored=scored, precondition=p) for p in (False, True)
    )
    assert better.margin > plain.margin


def test_a_batch_norm_behind_the_step_acts_alike_in_both_modes() -> None:
    model, batch = labeled(ENTRIES["CifarResNet-post-projection"], torch.float32, copies=8)
    jump = jumpboard(model, batch, after=2, precondition=True)
    block = jump.model.layer1[2]
    h = ed.as_stream(model).observe(batch).h[2].detach()
    with torch.no_grad():
        steady = block.eval()(h)
        live = block.train()(h)
    assert (live - steady).norm() < 0.1 * (steady - h).norm()


def test_the_old_model_and_the_score_can_be_used_again() -> None:
    model, batch = labeled(ENTRIES["ViT"], torch.float32)
    before = mean_loss(model, batch)
    scored = score(model, batch)
    first = jumpboard(model, batch, after=1, scored=scored)
    assert mean_loss(model, batch) == before
    assert jumpboard(model, batch, after=1, scored=scored).eta == first.eta
    assert mean_loss(scored.candidates[1].model, batch) == pytest.approx(before, rel=1e-6)
    shared = {p.data_ptr() for p in model.parameters()}
    assert not shared & {p.data_ptr() for p in first.model.parameters()}


def test_a_model_at_its_optimum_is_given_back() -> None:
    """Zero weights in the head: no gradient reaches any block."""
    model = mlp()
    nn.init.zeros_(model.head.weight)
    jump = jumpboard(model, points(model, 32))
    assert not jump.found
    assert jump.model is model
    assert "the old model is kept" in str(jump)


def test_too_few_evaluations_are_refused() -> None:
    with pytest.raises(SettingError, match=r"evaluations=1\); use a whole number of 2 or more"):
        jumpboard(mlp(), points(mlp(), 8), evaluations=1)
