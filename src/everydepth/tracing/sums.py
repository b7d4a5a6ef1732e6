"""Accumulators for metrics: sums by name, and values of the first rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}
DEPTH = "depth (blocks)"


def array(values: Tensor) -> np.ndarray:
    return values.detach().cpu().numpy()


class Sums(dict[str, Tensor]):
    """Sums over batches, by name; empty before the first."""

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self[name] = self[name] + value if name in self else value

    def array(self, name: str) -> np.ndarray:
        return array(self[name])


class Kept:
    """Values of the first rows, as many as fit in `limit` bytes, for quantiles over samples."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[Tensor] = []
        self._bytes = 0
        self.rows = 0

    def add(self, values: Tensor) -> None:
        """(row, ...)"""
        each = 4 * max(values[0].numel(), 1)
        room = max(self._limit - self._bytes, 0) // each
        if room and len(values):
            part = values[:room].float().cpu().clone()
            self._parts.append(part)
            self._bytes += part.nbytes
            self.rows += len(part)

    def values(self) -> np.ndarray:
        return torch.cat(self._parts).numpy()

    def quantiles(self, undefined: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """`q05 .. q95` over the rows, masked where `undefined`."""
        # Sorted once along contiguous memory: several times faster than np.quantile on axis 0.
        ordered = np.sort(np.ascontiguousarray(np.moveaxis(self.values(), 0, -1)), -1)
        found: dict[str, np.ndarray] = {}
        for name, share in QUANTILES.items():
            place = share * (ordered.shape[-1] - 1)
            low = int(place)
            high = min(low + 1, ordered.shape[-1] - 1)
            a, b = ordered[..., low].astype(np.float64), ordered[..., high]
            found[name] = a + (b - a) * (place - low)
            if undefined is not None and undefined.any():
                found[name] = np.ma.masked_array(found[name], mask=undefined)
        return found
