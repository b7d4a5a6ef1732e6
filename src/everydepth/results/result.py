"""A named measurement: arrays, what they mean, how to read them, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from everydepth.config import checked
from everydepth.errors import SettingError

Kind = Literal[
    "curve", "family", "histogram", "bars", "scatter", "matrix", "grid", "scalar", "table", "rows"
]
"""How a result is laid out, and so how it is drawn. x is `arrays[axis]`, by default the depth.

curve: one value per x for every name in `series`. Quantiles, where there are any, are
    `q05, q25, q50, q75, q95` of the first series; `<name>_low` and `<name>_high` are a band around
    a series; `<name>_<axis>` is the x of a series that has its own. `meta["maps"]` names an array
    (x, i, j), whose last map is drawn beside the lines; `labels["maps"]` is what i and j are.
family: an array (x, columns) for every name in `series`: a line for each of `arrays["columns"]`.
histogram: a count per x, with its `cumulative` share.
bars: as curve, but bars; x may be words.
scatter: points at x and each of `series`; `arrays["text"]` names them, a line joins those for which
    `arrays["front"]` is true.
matrix: one value per pair; rows are x, columns `arrays["columns"]` (by default x again).
grid: one row per x, one column per token, `text` and `probability` in each cell.
scalar: arrays of one number.
table: columns of equal length, in the order of `series`, drawn against the first.
rows: the same, but to be read, not drawn.
"""

Better = Literal["higher", "lower"]
_OVER_AXIS = ("curve", "family", "histogram", "bars", "scatter", "matrix")


@checked
@dataclass(frozen=True, kw_only=True)
class Result:
    """One measurement.

    name: unique within its `Results`. kind, axis: see `Kind`.
    series: names of the arrays to show; the first is what `results[name]` returns.
    arrays: numpy arrays; a value that is undefined (the cosine of a constant feature) is masked in
        a `numpy.ma.MaskedArray`, never NaN.
    labels: what an array or an axis is called in a figure, with its unit:
        `{"depth": "depth (blocks)", "value": "cross-entropy (nat)"}`.
    title: a heading; by default the name in words.
    about: one sentence: what it is and how to read it.
    unit: of the first series. "share" is a number from 0 to 1, which figures and words show in
        percent; "bytes", "count" and "FLOP" are shortened in tables.
    better: "higher", "lower", or None where neither is.
    section: the part of a report it belongs to, such as "prediction" or "cost"; any word will do.
    meta: settings and facts that fit into JSON (sample count, estimator, thresholds).
    note: what is missing or to be read with care; None if nothing is.

    >>> import numpy as np
    >>> from everydepth.results import Result
    >>> speed = Result(
    ...     name="latency", kind="curve", series=("ms",), unit="ms", better="lower",
    ...     arrays={"depth": np.arange(3), "ms": np.array([1.0, 2.0, 3.5])},
    ... )
    >>> speed.title, speed.value.max()
    ('Latency', np.float64(3.5))
    """

    name: str
    kind: Kind
    series: tuple[str, ...]
    arrays: Mapping[str, np.ndarray]
    axis: str = "depth"
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    title: str = ""
    about: str = ""
    unit: str = ""
    better: Better | None = None
    section: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])
    note: str | None = None

    def __post_init__(self) -> None:
        for array in self.arrays.values():
            array.flags.writeable = False
        if not self.title:
            object.__setattr__(self, "title", readable(self.name))
        self._check()

    def _check(self) -> None:
        """Whether the arrays are laid out as the kind says."""
        for name in self.series:
            if name not in self.arrays:
                raise SettingError(f"{self.name} has no array {name!r:.40}, which `series` names")
            if self.kind not in _OVER_AXIS:
                continue
            own = f"{name}_{self.axis}" in self.arrays or self.axis in self.arrays
            values = self.arrays[name]
            if not own or values.ndim < 1 or self.x(name).shape != values.shape[:1]:
                raise SettingError(
                    f"{self.name} has no {self.axis!r:.40} for each value of {name!r:.40}; "
                    f"give arrays[{self.axis!r:.40}], of one dimension and as long"
                )
            if values.dtype.kind not in "biuf":
                raise SettingError(f"the values of {self.name} are {values.dtype}, not numbers")

    @property
    def value(self) -> np.ndarray:
        """The main array; an error with the reason where it could not be measured."""
        if not self.series:
            raise SettingError(f"{self.name} has no values: {self.note}; measure again without it")
        return self.arrays[self.series[0]]

    @property
    def is_gap(self) -> bool:
        """True if nothing could be measured; `note` says why."""
        return not self.series

    def __str__(self) -> str:
        from everydepth.results.grid import grid_lines
        from everydepth.results.layout import table_of

        return "\n".join(grid_lines(self)) if self.kind == "grid" else str(table_of(self))

    def label(self, name: str) -> str:
        return self.labels.get(name, name.replace("_", " "))

    def x(self, series: str | None = None) -> np.ndarray:
        """The positions of a series: its own, or those of the axis."""
        own = f"{series}_{self.axis}"
        return np.asarray(self.arrays[own if own in self.arrays else self.axis])

    def at_depth(self, series: str | None = None) -> dict[int, float]:
        """Depth -> value of one series (the first by default), where it is defined."""
        values = numbers(self.value if series is None else self.arrays[series])
        return {
            int(d): float(v) for d, v in zip(self.x(series), values, strict=True) if np.isfinite(v)
        }


def gap(name: str, kind: Kind, reason: str) -> Result:
    """A clearly marked gap: it was asked for and cannot be measured."""
    return Result(name=name, kind=kind, series=(), arrays={}, note=reason)


def defined(values: np.ndarray) -> np.ndarray:
    """The values, with those that are NaN masked; unchanged where all are defined."""
    values = np.asarray(values)
    if values.dtype.kind != "f" or not np.isnan(values).any():
        return values
    return np.ma.masked_array(np.nan_to_num(values, nan=0.0), mask=np.isnan(values))


def numbers(values: np.ndarray) -> np.ndarray:
    """Floats with NaN where a value is undefined."""
    return np.ma.filled(np.ma.asarray(values).astype(float), np.nan)


def readable(name: str) -> str:
    """`next_token_accuracy` as a heading."""
    words = name.replace("_", " ")
    return words[:1].upper() + words[1:]


def called(title: str) -> str:
    """A heading within a sentence; what is written in capitals stays so."""
    return title if title[1:2].isupper() else title[:1].lower() + title[1:]
