"""What a metric gives: named arrays, what they mean, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from everydepth.errors import SettingError

Kind = Literal["curve", "matrix", "histogram", "grid", "scalar", "table"]
"""How a result is laid out, and so how it is drawn.

curve: `arrays["depth"]` and, for every name in `series`, one value per depth. Quantiles, where
    there are any, are `q05, q25, q50, q75, q95` of the first series.
matrix: one value per pair of depths; rows are `arrays["depth"]`, columns `arrays["columns"]` (the
    same depths within one model, those of the second model between two).
histogram: a count per `arrays["depth"]`, with its `cumulative` share.
grid: one row per depth, one column per token, text and probability in each cell.
scalar: arrays of one number.
table: columns of equal length, in the order of `series`.
"""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One metric's outcome.

    name: the metric's name. kind: see `Kind`.
    series: names of the arrays to show; the first is what `trace[name]` returns.
    arrays: numpy arrays; a value that is undefined (the cosine of a constant feature) is masked in
        a `numpy.ma.MaskedArray`, never NaN.
    labels: what an array or an axis is called in a figure, with its unit:
        `{"depth": "depth (blocks)", "value": "cross-entropy (nat)"}`.
    meta: settings and facts that fit into JSON (sample count, estimator, thresholds).
    note: what is missing or to be read with care; None if nothing is.
    """

    name: str
    kind: Kind
    series: tuple[str, ...]
    arrays: Mapping[str, np.ndarray]
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])
    note: str | None = None

    def __post_init__(self) -> None:
        for array in self.arrays.values():
            array.flags.writeable = False

    @property
    def value(self) -> np.ndarray:
        """The main array; an error with the reason where the metric could not be computed."""
        if not self.series:
            raise SettingError(f"{self.name} has no values: {self.note}; trace it again without")
        return self.arrays[self.series[0]]

    @property
    def is_gap(self) -> bool:
        """True if nothing could be computed; `note` says why."""
        return not self.series

    def label(self, name: str) -> str:
        return self.labels.get(name, name.replace("_", " "))


def gap(name: str, kind: Kind, reason: str) -> Result:
    """A clearly marked gap: the metric was asked for and cannot be computed."""
    return Result(name=name, kind=kind, series=(), arrays={}, note=reason)


def defined(values: np.ndarray) -> np.ndarray:
    """The values, with those that are NaN masked; unchanged where all are defined."""
    values = np.asarray(values)
    if values.dtype.kind != "f" or not np.isnan(values).any():
        return values
    return np.ma.masked_array(np.nan_to_num(values, nan=0.0), mask=np.isnan(values))
