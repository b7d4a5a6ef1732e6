"""Drawing functions shared by recipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def band(axis: Any, x: Sequence[float | int], values: Any, label: str, **style: Any) -> None:
    """A curve of means with the range of the seeds. values: (seed, x)."""
    found = np.ma.masked_invalid(np.array(values, dtype=float))
    mean: Any = found.mean(0)
    (line,) = axis.plot(x, mean, marker="o", markersize=3, label=label, **style)
    if len(found) > 1:
        low: Any = found.min(0)
        high: Any = found.max(0)
        axis.fill_between(x, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
