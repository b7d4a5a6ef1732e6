"""Is the new model better on rows used for nothing else? A paired interval answers that."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from torch import Tensor, nn

from everydepth.config import Seed, Setting, checked
from everydepth.errors import BatchError
from everydepth.growth.losses import losses_of
from everydepth.stream import ResidualStream, no_labels


@dataclass(frozen=True)
class Paired:
    """`L(old) - L(new)` on the same rows: positive if the new model is better.

    bootstrap: percentile interval over rows. bernstein: empirical Bernstein interval (Maurer and
    Pontil), valid for any distribution whose differences stay within the observed range.
    """

    rows: int
    old: float
    new: float
    gain: float
    bootstrap: tuple[float, float]
    bernstein: tuple[float, float]
    confidence: float

    @property
    def better(self) -> bool:
        return self.bootstrap[0] > 0

    @property
    def worse(self) -> bool:
        return self.bootstrap[1] < 0

    def __str__(self) -> str:
        low, high = self.bootstrap
        return (
            f"{_verdict(low, high)}: loss {self.old:.4g} -> {self.new:.4g}, gain {self.gain:+.4g} "
            f"({self.confidence:.0%} interval {low:+.4g} to {high:+.4g}, {self.rows:,} rows)"
        )

    @property
    def lines(self) -> list[tuple[str, str, str]]:
        """For a table: each interval's name, the gain with the interval, and the verdict."""
        found: list[tuple[str, str, str]] = []
        for name, (low, high) in (("bootstrap", self.bootstrap), ("bernstein", self.bernstein)):
            what = f"held-out gain ({name}, {self.confidence:.0%})"
            value = f"{self.gain:+.4g} ({low:+.4g} to {high:+.4g})"
            found.append((what, value, _verdict(low, high)))
        return found


@checked
def paired(
    old: nn.Module | ResidualStream,
    new: nn.Module | ResidualStream,
    data: Any,
    *,
    confidence: Annotated[float, Setting(above=0.5, below=1)] = 0.95,
    seed: Seed = 0,
    **settings: Any,
) -> Paired:
    """Compare two models row by row on data used for nothing else.

    >>> big = ed.insert(model, after=3)
    >>> found = ed.growth.paired(model, big, test)
    >>> found.better, found.worse  # the same function: neither
    (False, False)
    """
    return paired_losses(
        losses_of(old, data, strict=True, **settings),
        losses_of(new, data, strict=True, **settings),
        confidence=confidence,
        seed=seed,
    )


def paired_losses(
    old: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    *,
    confidence: float = 0.95,
    seed: int = 0,
) -> Paired:
    """The same from row losses and label counts, as returned by `losses_of`."""
    (before, counts), (after, _) = old, new
    rows = len(before)
    if rows < 2:
        raise BatchError(f"{rows} held-out row(s), but an interval needs 2 or more")
    total = counts.sum()
    if not total:
        raise no_labels()
    # Rows are weighted by their number of labels, so that the mean is the mean over labels.
    difference = ((before - after) * (rows / total)).numpy()
    confidence = min(confidence, 1 - 1e-15)  # 1 - 1e-300 is 1
    tail = (1 - confidence) / 2
    draws = min(max(2000, 50 * math.ceil(1 / tail)), 20_000)  # resamples, in groups of 50
    random = np.random.default_rng(seed)
    means = np.empty(draws)
    for start in range(0, draws, 50):
        chosen = random.integers(rows, size=(50, rows))
        weight = counts.numpy()[chosen].mean(1) * (rows / total.item())
        means[start : start + 50] = difference[chosen].mean(1) / np.maximum(weight, 1e-12)
    low, high = np.quantile(means, [tail, 1 - tail])
    gain = float(difference.mean())
    radius = _bernstein_radius(difference, 1 - confidence)
    return Paired(
        rows=rows,
        old=float(before.sum() / total),
        new=float(after.sum() / total),
        gain=gain,
        bootstrap=(float(low), float(high)),
        bernstein=(gain - radius, gain + radius),
        confidence=confidence,
    )


def _verdict(low: float, high: float) -> str:
    return "better" if low > 0 else "worse" if high < 0 else "inconclusive"


def _bernstein_radius(values: np.ndarray, delta: float) -> float:
    """Half the width of the two-sided empirical Bernstein interval of a mean."""
    n, log = len(values), math.log(4 / delta)
    spread = math.sqrt(2 * float(values.var(ddof=1)) * log / n)
    return spread + 7 * float(np.ptp(values)) * log / (3 * (n - 1))
