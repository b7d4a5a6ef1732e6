"""How sure samples make us that a risk is small: p-values that hold for any number of samples.

Each is a valid p-value for "the risk is above `risk`": under it, P(p <= delta) <= delta.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# Stakes for the bet of `paired_p_value`, as shares of the largest stake that cannot lose it all.
# With a share q of losses among samples and no gains the best is 1 - q / risk.
_STAKES = np.array([0.95, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1, 0.05])

MOST = 10**12
"""More samples than this are not counted: no one has them."""


@dataclass(frozen=True)
class Counts:
    """Calibration samples: how many got worse by leaving early, and how many got better."""

    samples: int
    worse: int
    better: int = 0

    @property
    def risk(self) -> float:
        return (self.worse - self.better) / self.samples


def binomial_p_value(counts: Counts, risk: float) -> float:
    """Exact, for a loss that is 0 or 1: the chance of so few losses if their rate is `risk`."""
    from scipy.special import bdtr

    return float(bdtr(counts.worse, counts.samples, risk))


def paired_p_value(counts: Counts, risk: float) -> float:
    """For a loss of -1, 0 or 1, by betting against "its mean is at least `risk`".

    A stake s multiplies the capital by `1 + s (risk - loss)` a sample; if the mean is at least
    `risk`, the expected capital never exceeds 1, for every s in [0, 1/(1 - risk)] and so for the
    average over stakes. By Markov's inequality 1/capital is a p-value; it adapts to the variance.
    """
    stakes = _STAKES / (1 - risk)
    same = counts.samples - counts.worse - counts.better
    numbers = {1: counts.worse, -1: counts.better, 0: same}
    capital = sum(n * np.log1p(stakes * (risk - loss)) for loss, n in numbers.items())
    return float(min(1.0, np.exp(math.log(len(stakes)) - np.logaddexp.reduce(capital))))


def bounded_p_value(losses: np.ndarray, risk: float) -> float:
    """The same bet for losses anywhere between -1 and 1, one per sample."""
    stakes = _STAKES / (1 - risk)
    capital = np.log1p(stakes[:, None] * (risk - losses[None])).sum(1)
    return float(min(1.0, np.exp(math.log(len(stakes)) - np.logaddexp.reduce(capital))))


P_VALUES: dict[str, Callable[[Counts, float], float]] = {
    "full": binomial_p_value,
    "labels": paired_p_value,
    "loss": paired_p_value,
}


def samples_needed(risk: float, delta: float, against: str) -> int:
    """With fewer samples, not even a policy that never errs can be certified; at most `MOST`."""
    p_value = P_VALUES[against]
    # Both p-values fall at least as fast as 8 (1 - risk / 2)^n.
    enough = math.ceil(min(2 * math.log(len(_STAKES) / delta) / risk, MOST))
    return 1 + bisect_left(
        range(1, enough), True, key=lambda n: p_value(Counts(n, 0), risk) <= delta
    )
