"""p-values: exact where they can be, and valid at the boundary of what they exclude."""

from __future__ import annotations

import math

import pytest
from scipy.stats import multinomial

from everydepth.exits.risk import Counts, binomial_p_value, paired_p_value, samples_needed


def test_the_binomial_p_value_is_the_lower_tail() -> None:
    n, worse, risk = 40, 3, 0.2
    tail = sum(math.comb(n, k) * risk**k * (1 - risk) ** (n - k) for k in range(worse + 1))
    assert binomial_p_value(Counts(n, worse), risk) == pytest.approx(tail, rel=1e-12)


@pytest.mark.parametrize("risk", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("better", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("delta", [0.05, 0.2])
def test_a_paired_loss_of_exactly_the_risk_passes_at_most_delta_of_the_time(
    risk: float, better: float, delta: float
) -> None:
    # Every outcome of 60 samples, weighted by its chance, with mean loss exactly `risk`.
    n, worse = 60, risk + better
    chance = 0.0
    for b in range(n + 1):
        for c in range(n + 1 - b):
            if paired_p_value(Counts(n, b, c), risk) <= delta:
                chance += multinomial.pmf([b, c, n - b - c], n, [worse, better, 1 - worse - better])
    assert chance <= delta


def test_gains_count_against_losses() -> None:
    alone = paired_p_value(Counts(5000, 50, 0), 0.01)
    balanced = paired_p_value(Counts(5000, 50, 40), 0.01)
    assert balanced < 0.05 < alone


def test_more_errors_give_a_larger_p_value() -> None:
    for p_value in (binomial_p_value, paired_p_value):
        values = [p_value(Counts(500, worse), 0.05) for worse in range(0, 30, 5)]
        assert values == sorted(values)


@pytest.mark.parametrize(
    ("against", "p_value"), [("full", binomial_p_value), ("labels", paired_p_value)]
)
@pytest.mark.parametrize("risk", [0.01, 0.3])
def test_the_number_of_samples_needed_is_the_smallest_that_can_pass(against, p_value, risk) -> None:
    needed = samples_needed(risk, 0.05, against)
    assert p_value(Counts(needed, 0), risk) <= 0.05 < p_value(Counts(needed - 1, 0), risk)
