from __future__ import annotations

import math

import pytest
import torch

from everydepth.data import SURFACES, surface_data
from everydepth.errors import DataError, SettingError

NAMES = sorted(SURFACES)


def test_there_are_the_eight_surfaces_of_the_table_in_its_order():
    assert list(SURFACES) == [
        "anisotropic_radial_oscillations",
        "damped_concentric_ripples",
        "exponential_saddle",
        "quadratically_warped_oscillations",
        "standing_wave_grid",
        "asymmetric_power_modulated_wave",
        "localized_high_frequency_stripes",
        "logarithmic_central_well",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_surface_is_finite_and_of_order_one_on_its_square(name: str):
    low, high = SURFACES[name].domain
    axis = torch.linspace(low, high, 201, dtype=torch.float64)
    values = SURFACES[name](torch.cartesian_prod(axis, axis))
    assert values.isfinite().all()
    assert 0.5 < values.abs().max() < 2
    assert values.std() > 0.05


@pytest.mark.parametrize("name", NAMES)
def test_a_surface_has_a_finite_gradient_everywhere_also_at_the_origin(name: str):
    axis = torch.linspace(-1, 1, 41, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis).requires_grad_()
    SURFACES[name](points).sum().backward()
    assert points.grad is not None
    assert points.grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_the_formula_text_matches_the_function(name: str):
    surface = SURFACES[name]
    points, _ = surface_data(name, n_train=20, n_test=1, dtype=torch.float64)
    functions = {f: getattr(math, f) for f in ("cos", "exp", "log", "sin", "sqrt", "pi")}
    for (x, y), value in zip(points.inputs.tolist(), points.labels.flatten().tolist(), strict=True):
        assert eval(surface.formula, functions | {"x": x, "y": y}) == pytest.approx(value)


def test_no_two_surfaces_are_alike():
    points, _ = surface_data(NAMES[0], n_train=2000, n_test=1)
    values = torch.stack([SURFACES[name](points.inputs) for name in NAMES])
    assert (torch.corrcoef(values).abs() - torch.eye(len(NAMES))).max() < 0.6


def test_a_seed_fixes_the_points_in_every_precision_and_for_any_test_size():
    train, test = surface_data("exponential_saddle", n_train=50, n_test=40, seed=3)
    again, _ = surface_data("exponential_saddle", n_train=50, n_test=7, seed=3, dtype=torch.float64)
    other, _ = surface_data("exponential_saddle", n_train=50, n_test=40, seed=4)
    assert torch.equal(train.inputs, again.inputs.float())
    assert torch.equal(train.labels, again.labels.float())
    assert not torch.equal(train.inputs, other.inputs)
    assert not torch.equal(train.inputs[:40], test.inputs)
    assert (len(train), len(test)) == (50, 40)
    assert train.labels.shape == (50, 1)


def test_an_unknown_surface_is_answered_with_the_known_ones():
    with pytest.raises(DataError, match=r"surface 'plane', but the surfaces are anisotropic_.*use"):
        surface_data("plane")


def test_no_points_are_refused():
    with pytest.raises(DataError, match=r"0 training and 5 test points; use at least 1 of each"):
        surface_data("exponential_saddle", n_train=0, n_test=5)


def test_a_negative_seed_is_refused():
    with pytest.raises(SettingError, match=r"seed=-1\); use a whole number of 0 or more"):
        surface_data("exponential_saddle", seed=-1)
