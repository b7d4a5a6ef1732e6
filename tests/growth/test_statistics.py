"""Is a mean gradient more than noise? False alarms and power."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.helpers.growth import mlp, points

from everydepth.growth import score
from everydepth.growth.scoring import DEEPEN
from everydepth.growth.statistics import Sketch, adjusted_p, evidence


def grams(
    random: np.random.Generator, *, groups: int = 32, sites: int = 5, shift: float = 0.0
) -> list[np.ndarray]:
    """Group means of skewed, correlated gradients at several sites; `shift` at the first."""
    shared = random.exponential(size=(groups, 10, 6)).mean(1) - 1
    found: list[np.ndarray] = []
    for site in range(sites):
        own = random.standard_normal((groups, 40)) * np.geomspace(1, 0.05, 40)
        rows = np.concatenate([own, shared], 1)
        rows[:, 0] += shift if site == 0 else 0.0
        found.append(rows @ rows.T)
    return found


def test_false_alarms_over_all_sites_stay_at_five_percent() -> None:
    random = np.random.default_rng(0)
    alarms = np.mean([(adjusted_p(grams(random), flips=200)[0] <= 0.05).any() for _ in range(500)])
    # Three standard errors above 5 % for 500 trials.
    assert alarms <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 500)


def test_a_planted_direction_is_found_at_its_site() -> None:
    random = np.random.default_rng(1)
    found = [adjusted_p(grams(random, shift=1.2), flips=200)[0] for _ in range(200)]
    assert np.mean([p[0] <= 0.05 for p in found]) >= 0.9


def test_the_estimate_of_the_squared_norm_is_unbiased() -> None:
    random = np.random.default_rng(2)
    values = [evidence(grams(random, shift=0.5)[0]).squared for _ in range(500)]
    assert np.mean(values) == pytest.approx(0.25, abs=4 * np.std(values) / np.sqrt(500))


def test_the_z_score_has_unit_spread_without_signal_and_grows_without_bound() -> None:
    random = np.random.default_rng(3)
    null = [evidence(grams(random)[0]).z for _ in range(400)]
    assert np.mean(null) == pytest.approx(0, abs=0.15)
    assert np.std(null) == pytest.approx(1, abs=0.2)
    assert evidence(grams(random, shift=100.0)[0]).z > 1000


def test_the_bootstrap_interval_covers() -> None:
    random = np.random.default_rng(4)
    found = [evidence(grams(random, shift=1.5)[0]) for _ in range(300)]
    assert np.mean([e.low <= 2.25 <= e.high for e in found]) >= 0.88


def test_a_gram_of_zeros_is_no_signal() -> None:
    zeros = np.zeros((8, 8))
    assert evidence(zeros).z == 0
    assert adjusted_p([zeros])[0][0] == 1.0


def test_a_sketch_keeps_inner_products_on_average() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 300, dtype=torch.float64)
    exact = float(x @ y)
    found = [float(s(x) @ s(y)) for s in (Sketch(300, seed) for seed in range(400))]
    assert np.mean(found) == pytest.approx(exact, abs=4 * np.std(found) / 20)
    assert torch.equal(Sketch(32, 0)(x[:32]), x[:32])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_whole_models_without_an_improving_direction_are_left_alone() -> None:
    """Labels drawn from the model's own prediction: the expected gradient is zero everywhere."""
    alarms = 0
    for trial in range(500):
        model = mlp(trial)
        found = score(model, points(model, 128, seed=trial), batch_size=128)
        alarms += any(site.verdict == DEEPEN for site in found.sites)
    print(f"false 'deepen': {alarms} of 500")
    assert alarms / 500 <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / 500)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_whole_models_with_a_planted_direction_are_deepened() -> None:
    """Labels drawn from the model with one more, active block."""
    from everydepth.growth.candidates import candidate
    from everydepth.stream import as_stream

    hits = 0
    for trial in range(200):
        model = mlp(trial)
        teacher = candidate(as_stream(model), 1, seed=trial + 1)
        with torch.no_grad():
            torch.nn.init.normal_(teacher.maps[0].weight, std=0.5)
        data = points(teacher.model, 512, seed=trial, scale=2.0)
        hits += score(model, data, batch_size=256).verdict.startswith(DEEPEN)
    print(f"power: {hits} of 200")
    assert hits / 200 >= 0.9
