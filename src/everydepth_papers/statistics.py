"""Intervals and rank correlations of a few runs or layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np

from everydepth.ablations.result import Floats
from everydepth.config import Setting, checked
from everydepth.errors import SettingError


@checked
def interval(
    values: Sequence[float] | Floats,
    confidence: Annotated[float, Setting(above=0, below=1)] = 0.95,
) -> tuple[float, float]:
    """Student's t interval for the mean of a few runs; NaN for fewer than two.

    Values that are not finite are left out.

    >>> from everydepth_papers.statistics import interval
    >>> low, high = interval([1.0, 2.0, 3.0])
    >>> round(low, 2), round(high, 2)
    (-0.48, 4.48)
    """
    from scipy.stats import t

    found = _one_axis("values", values)
    found = found[np.isfinite(found)]
    if len(found) < 2:
        return math.nan, math.nan
    half = t.ppf(0.5 + confidence / 2, len(found) - 1) * found.std(ddof=1) / len(found) ** 0.5
    return float(found.mean() - half), float(found.mean() + half)


@checked
def spearman(a: Sequence[float] | Floats, b: Sequence[float] | Floats) -> float:
    """The rank correlation; NaN if it has none: one side is constant, empty, or contains NaN.

    >>> from everydepth_papers.statistics import spearman
    >>> spearman([1.0, 2.0, 3.0], [0.1, 0.4, 0.2])
    0.5
    """
    from scipy.stats import spearmanr

    first, second = _one_axis("a", a), _one_axis("b", b)
    if len(first) != len(second):
        raise SettingError(
            f"a has {len(first)} values and b {len(second)}; pass one of each per run or layer"
        )
    if any(len(np.unique(side)) < 2 for side in (first, second)):
        return math.nan
    return float(spearmanr(first, second).statistic)  # pyright: ignore[reportAttributeAccessIssue]


def _one_axis(name: str, values: Sequence[float] | Floats) -> Floats:
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1:
        raise SettingError(
            f"{name} has the shape {found.shape}; use one axis: a number per run or layer"
        )
    return found
