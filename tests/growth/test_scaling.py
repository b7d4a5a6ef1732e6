"""Scaling laws: fits with known answers, and plans."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

import everydepth as ed
from everydepth.errors import DataError, SettingError
from everydepth.growth.scaling import (
    EPOCH,
    LEVINE,
    ScalingWarning,
    fit,
    plan,
)


def law_points(noise: float = 0.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    n, d = 10 ** random.uniform(7, 10, 80), 10 ** random.uniform(8, 12, 80)
    return n, d, EPOCH(n, d) * np.exp(noise * random.standard_normal(80))


def test_a_law_without_noise_is_recovered() -> None:
    n, d, loss = law_points()
    found = fit(n, loss, d, starts=10)
    for name, value in EPOCH.values.items():
        assert found[name] == pytest.approx(value, rel=1e-3)
    assert found.converged
    assert found(n, d) == pytest.approx(loss, rel=1e-4)


def test_intervals_cover_the_truth() -> None:
    n, d, loss = law_points(noise=0.005)
    found = fit(n, loss, d, starts=8, bootstrap=40)
    assert found.intervals is not None
    for name in ("E", "alpha", "beta"):
        low, high = found.intervals[name]
        assert low < found[name] < high
        assert low - 0.02 < EPOCH[name] < high + 0.02
    assert "alpha" in str(found)


def test_one_size_gives_a_plain_power_law() -> None:
    n = np.geomspace(1e3, 1e6, 20)
    found = fit(n, 0.5 + 30 * n**-0.4, starts=10)
    assert (found["E"], found["A"], found["alpha"]) == pytest.approx((0.5, 30, 0.4), rel=1e-3)


def test_bad_points_are_refused() -> None:
    n, d, loss = law_points()
    with pytest.raises(DataError, match=r"5 points for 5 unknowns \(E, A, alpha, B, beta\)"):
        fit(n[:5], loss[:5], d[:5])
    with pytest.raises(DataError, match="columns of"):
        fit(n, loss[:9])
    with pytest.raises(DataError, match="finite and above 0"):
        fit(n, -loss)


def test_a_fit_that_does_not_settle_warns() -> None:
    n = np.array([1e6] * 10)
    with pytest.warns(ScalingWarning, match="did not settle"):
        fit(n, np.random.default_rng(0).uniform(1, 9, 10), n, starts=6)


def test_a_budget_is_spent_where_the_law_is_lowest() -> None:
    found = plan(flops=5.76e23)
    n = np.geomspace(found.parameters / 10, found.parameters * 10, 4001)
    best = n[np.argmin(EPOCH(n, 5.76e23 / (6 * n)))]
    assert found.parameters == pytest.approx(best, rel=2e-3)
    assert found.flops == pytest.approx(5.76e23)
    assert plan(parameters=found.parameters).tokens == pytest.approx(found.tokens, rel=1e-6)
    # Chinchilla itself: 70 billion parameters, 1.4 trillion tokens.
    assert found.parameters == pytest.approx(70e9, rel=0.1)
    assert "Chinchilla" in str(found)


@pytest.mark.parametrize("row", LEVINE, ids=lambda row: row[0])
def test_depth_and_width_follow_the_projections(row: tuple[object, ...]) -> None:
    _, n, _, _, depth, width = row
    found = plan(parameters=n)
    assert found.depth == depth
    # 12 depth width^2 leaves out embeddings, which weigh most in small models.
    assert found.width == pytest.approx(width, rel=0.3)


def test_bad_plans_say_what_is_allowed() -> None:
    with pytest.raises(SettingError, match="give one of the two"):
        plan()
    with pytest.raises(SettingError, match=r"parameters=-1\.0; use a number from 1 up to 1e\+30"):
        plan(parameters=-1.0)
    n = np.geomspace(1e3, 1e6, 20)
    with pytest.raises(SettingError, match="fit one with tokens="):
        plan(parameters=1e9, law=fit(n, 0.5 + 30 * n**-0.4, starts=3))


@pytest.mark.slow
def test_the_chinchilla_points_give_the_published_refit(data_folder: Path) -> None:
    points = data_folder / "chinchilla" / "svg_extracted_data.csv"
    with open(points, encoding="utf-8") as file:
        rows = sorted(csv.DictReader(file), key=lambda r: float(r["loss"]))[:-5]
    n, c, loss = (
        np.array([float(r[k]) for r in rows]) for k in ("Model Size", "Training FLOP", "loss")
    )
    found = ed.growth.scaling.fit(n, loss, c / (6 * n))
    assert (found["E"], found["alpha"], found["beta"]) == pytest.approx(
        (1.817, 0.348, 0.366), abs=3e-3
    )
