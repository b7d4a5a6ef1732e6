"""Small helpers of several metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}
DEPTH = "depth (blocks)"


def depths(last: int, first: int = 0) -> np.ndarray:
    return np.arange(first, last + 1)


def array(values: Tensor) -> np.ndarray:
    return values.detach().cpu().numpy()


def quantiles(values: np.ndarray, axis: int = -1) -> dict[str, np.ndarray]:
    """Five quantiles along the axis of samples."""
    found = np.quantile(values, list(QUANTILES.values()), axis=axis)
    return dict(zip(QUANTILES, found, strict=True))


def plain(value: Any) -> Any:
    """A numpy number as Python's own, for JSON."""
    return value.item() if isinstance(value, np.generic) else value
