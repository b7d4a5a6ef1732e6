"""Finite-sample p-values for the hypothesis that a risk is above `risk`.

Under the hypothesis, P(p <= delta) <= delta for any number of samples.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# Stakes of the bet in `_betting_p_value`, relative to the largest that cannot lose everything.
# With a share q of losses and no gains, the best is 1 - q / risk.
_STAKES = np.array([0.95, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1, 0.05])

MOST = 10**12
"""The largest answer of `samples_needed`: no one has more samples."""


_MEANT = {
    "full": "the share of predictions that differ from the full model's",
    "labels": "the loss of accuracy",
    "loss": "the increase of the loss",
}


def bounded(risk: float, delta: float, samples: int, against: str) -> str:
    """A bound that was certified, in words."""
    return (
        f"with probability {1 - delta:g} over {samples:,} calibration samples, {_MEANT[against]} "
        f"is at most {risk:g}"
    )


@dataclass(frozen=True)
class Counts:
    """Calibration samples, and how many got worse or better by exiting early."""

    samples: int
    worse: int
    better: int = 0

    @property
    def risk(self) -> float:
        return (self.worse - self.better) / self.samples


def binomial_p_value(counts: Counts, risk: float) -> float:
    """Exact, for losses of 0 or 1: the probability of this few losses if their rate is `risk`."""
    from scipy.special import bdtr

    return float(bdtr(counts.worse, counts.samples, risk))


def paired_p_value(counts: Counts, risk: float) -> float:
    """For losses of -1, 0 or 1."""
    same = counts.samples - counts.worse - counts.better
    numbers = np.array([counts.worse, counts.better, same])
    return _betting_p_value(np.array([1, -1, 0]), numbers, risk)


def bounded_p_value(losses: np.ndarray, risk: float) -> float:
    """For losses anywhere between -1 and 1, one per sample."""
    return _betting_p_value(losses, np.ones(len(losses)), risk)


def _betting_p_value(losses: np.ndarray, numbers: np.ndarray, risk: float) -> float:
    """A bet against "the mean loss is at least `risk`", on `numbers` samples with each loss.

    A stake s multiplies the capital by `1 + s (risk - loss)` per sample. If the mean is at least
    `risk`, the expected capital never exceeds 1, for every s in [0, 1/(1 - risk)] and so for the
    average over stakes. By Markov's inequality, 1/capital is a p-value; it adapts to the variance.
    """
    stakes = _STAKES / (1 - risk)
    capital = np.log1p(stakes[:, None] * (risk - losses)) @ numbers
    return float(min(1.0, np.exp(math.log(len(stakes)) - np.logaddexp.reduce(capital))))


P_VALUES: dict[str, Callable[[Counts, float], float]] = {
    "full": binomial_p_value,
    "labels": paired_p_value,
    "loss": paired_p_value,
}


def samples_needed(risk: float, delta: float, against: str) -> int:
    """The fewest samples with which a policy that never errs can be certified; at most `MOST`."""
    p_value = P_VALUES[against]
    # Both p-values fall at least as fast as 8 (1 - risk / 2)^n.
    enough = math.ceil(min(2 * math.log(len(_STAKES) / delta) / risk, MOST))
    return 1 + bisect_left(
        range(1, enough), True, key=lambda n: p_value(Counts(n, 0), risk) <= delta
    )
