"""Intervals and rank correlations of a few runs or layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from everydepth.ablations.result import Floats


def interval(values: Sequence[float] | Floats, confidence: float = 0.95) -> tuple[float, float]:
    """Student's t interval for the mean of a few runs; NaN for fewer than two.

    >>> from everydepth_papers.statistics import interval
    >>> low, high = interval([1.0, 2.0, 3.0])
    >>> round(low, 2), round(high, 2)
    (-0.48, 4.48)
    """
    from scipy.stats import t

    found = np.asarray(values, dtype=np.float64)
    found = found[np.isfinite(found)]
    if len(found) < 2:
        return math.nan, math.nan
    half = t.ppf(0.5 + confidence / 2, len(found) - 1) * found.std(ddof=1) / len(found) ** 0.5
    return float(found.mean() - half), float(found.mean() + half)


def spearman(a: Sequence[float] | Floats, b: Sequence[float] | Floats) -> float:
    """The rank correlation; NaN if one of the two is constant."""
    from scipy.stats import spearmanr

    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    return float(spearmanr(a, b).statistic)  # pyright: ignore[reportAttributeAccessIssue]
