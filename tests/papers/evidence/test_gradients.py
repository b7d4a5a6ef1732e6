"""Covariances and agreement of gradients are those of plain formulas."""

from __future__ import annotations

import pytest
import torch

from everydepth_papers.evidence.gradients import of_rows


def test_independent_coordinates_look_independent_and_equal_ones_do_not() -> None:
    draw = torch.Generator().manual_seed(0)
    apart = torch.randn(800, 20, generator=draw, dtype=torch.float64)
    found = of_rows(apart)
    assert found["within_10"] > 0.95
    assert sum(found["histogram"]) == 20 * 19
    assert sum(found["histogram"][20:30]) / (20 * 19) == found["within_10"]
    assert found["within_10_noise"] > 0.95
    assert found["norm_over_variance"] < 2
    same = apart[:, :1].expand(-1, 20) + 0.01 * apart
    assert of_rows(same)["within_10"] == 0.0
    assert of_rows(same)["norm_over_variance"] == pytest.approx(20, rel=0.05)


def test_gradients_with_a_common_direction_agree_and_the_bound_says_so() -> None:
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(400, 10, generator=draw, dtype=torch.float64)
    aligned = of_rows(noise + 2.0)
    assert aligned["disagree"] == 0.0
    # 8 k / (n |mu|^2) + 4 k tr / (n |mu|^2)^2 of unit variances, |mu|^2 = 40, n = 100.
    assert aligned["disagree_bound"] == pytest.approx(8 / 4000 + 40 / 4000**2, rel=0.5)
    assert of_rows(noise)["disagree"] == pytest.approx(0.5, abs=0.2)
    assert of_rows(noise)["disagree_bound"] == 1.0
