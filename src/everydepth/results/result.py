"""A named measurement: its arrays, and how to read and draw them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from everydepth.config import brief, checked
from everydepth.errors import SettingError

Kind = Literal[
    "curve", "family", "histogram", "bars", "scatter", "matrix", "grid", "scalar", "table", "rows"
]
"""How a result is laid out, and so how it is drawn. x is `arrays[axis]`, by default the depth.

curve: one value per x for every name in `series`. Optional arrays: `q05, q25, q50, q75, q95`,
    quantiles of the first series; `<name>_low` and `<name>_high`, a band around a series;
    `<name>_<axis>`, the x values of a series that has its own. `meta["maps"]` names an array
    (x, i, j) whose last map is drawn next to the lines; `labels["maps"]` describes i and j.
family: an array (x, columns) for every name in `series`: a line for each of `arrays["columns"]`.
histogram: a count per x, with its `cumulative` share.
bars: like curve, drawn as bars; x may be text.
scatter: points at x and each of `series`; `arrays["text"]` labels them, and a line joins those for
    which `arrays["front"]` is true.
matrix: one value per pair; rows are x, columns `arrays["columns"]` (by default x again).
grid: one row per x, one column per token of `tokens`, with `text` and `probability` in each cell.
scalar: arrays of one number.
table: columns of equal length, in the order of `series`, drawn against the first.
rows: the same, for reading only.
"""

Better = Literal["higher", "lower"]
_OF_GRIDS = ("text", "tokens", "probability")
_OVER_AXIS = ("curve", "family", "histogram", "bars", "scatter", "matrix")


@checked
@dataclass(frozen=True, kw_only=True)
class Result:
    """One measurement.

    name: unique within its `Results`. kind, axis: see `Kind`.
    series: names of the arrays to show; `results[name]` returns the first.
    arrays: numpy arrays; an undefined value (such as the cosine of a constant feature) is masked in
        a `numpy.ma.MaskedArray`, never NaN.
    labels: names of arrays and axes in figures, with units:
        `{"depth": "depth (blocks)", "value": "cross-entropy (nat)"}`.
    title: a heading; by default made from the name.
    about: one sentence on what it is and how to read it.
    unit: of the first series. A "share" is a number from 0 to 1, displayed in percent; "bytes",
        "count" and "FLOP" are abbreviated in tables.
    better: "higher", "lower", or None if neither is.
    section: the part of a report it belongs to, such as "prediction" or "cost".
    meta: settings and facts as JSON values (sample count, estimator, thresholds).
    note: what is missing or needs care; None if nothing.

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
        """Raise an error if the arrays are not laid out as the kind requires."""
        for name in (*self.series, *(_OF_GRIDS if self._has("grid") else ())):
            if name not in self.arrays:
                why = "`series` names" if name in self.series else f"a {self.kind} needs"
                raise SettingError(f"{self.name} has no array {brief(name)}, which {why}")
        for name in self.series:
            values = self.arrays[name]
            if self._has(*_OVER_AXIS):
                own = f"{name}_{self.axis}" in self.arrays or self.axis in self.arrays
                if not own or values.ndim < 1 or self.x(name).shape != values.shape[:1]:
                    raise SettingError(
                        f"{self.name} has no {brief(self.axis)} for each value of {brief(name)}; "
                        f"give a one-dimensional arrays[{brief(self.axis)}] of the same length"
                    )
                if values.dtype.kind not in "biuf":
                    raise SettingError(f"the values of {self.name} are {values.dtype}, not numbers")
        self._check_shapes()

    def _check_shapes(self) -> None:
        wanted: dict[str, tuple[int, ...]] = {}
        first = self.arrays[self.series[0]] if self.series else None
        if self._has("matrix", "family"):
            across = self.arrays.get("columns", self.x())
            wanted = dict.fromkeys(self.series, (len(self.x()), *across.shape[:1]))
        elif self._has("grid"):
            size = (len(self.x()), *self.arrays["tokens"].shape[:1])
            wanted = {"text": size, "probability": size}
        elif self._has("table", "rows") and first is not None:
            wanted = dict.fromkeys(self.series, first.shape[:1] or (0,))
        elif self._has("curve", "histogram", "bars", "scatter"):
            wanted = {name: self.x(name).shape for name in self.series}
        for name, shape in wanted.items():
            if self.arrays[name].shape != shape:
                raise SettingError(
                    f"{self.name}: {brief(name)} is of shape {self.arrays[name].shape}, but a "
                    f"{self.kind} needs {shape} here; see `everydepth.results.Kind`"
                )
        empty = [n for n in self.series if self._has("scalar") and not self.arrays[n].size]
        if empty:
            raise SettingError(f"{self.name}: {brief(empty[0])} holds no number; give one")

    def _has(self, *kinds: str) -> bool:
        """Whether it is of one of these kinds, and has values."""
        return self.kind in kinds and bool(self.series)

    @property
    def value(self) -> np.ndarray:
        """The main array; an error with the reason if it could not be measured."""
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

    @checked
    def label(self, name: str) -> str:
        return self.labels.get(name, name.replace("_", " "))

    def x(self, series: str | None = None) -> np.ndarray:
        """The x values of a series: its own, or those of the axis."""
        own = f"{series}_{self.axis}"
        return np.asarray(self.arrays[own if own in self.arrays else self.axis])

    @checked
    def at_depth(self, series: str | None = None) -> dict[int, float]:
        """Depth -> value of one series (by default the first), where defined."""
        if series is not None and series not in self.arrays:
            known = ", ".join(self.series)
            raise SettingError(f"{self.name} has no series {series!r}; it has {known}")
        values = numbers(self.value if series is None else self.arrays[series])
        return {
            int(d): float(v) for d, v in zip(self.x(series), values, strict=True) if np.isfinite(v)
        }


@checked
def gap(name: str, kind: Kind, reason: str) -> Result:
    """A placeholder for a measurement that was requested but could not be made."""
    return Result(name=name, kind=kind, series=(), arrays={}, note=reason)


@checked
def defined(values: np.ndarray) -> np.ndarray:
    """The values with NaN masked; unchanged if there are none."""
    values = np.asanyarray(values)  # a mask that is there stays
    plain = np.asarray(values)
    if plain.dtype.kind != "f" or not np.isnan(plain).any():
        return values
    undefined = np.isnan(plain) | np.ma.getmaskarray(values)
    return np.ma.masked_array(np.nan_to_num(plain, nan=0.0), mask=undefined)


def numbers(values: np.ndarray) -> np.ndarray:
    """Floats, with NaN for undefined values."""
    return np.ma.filled(np.ma.asarray(values).astype(float), np.nan)


def readable(name: str) -> str:
    """`next_token_accuracy` as a heading."""
    words = name.replace("_", " ")
    return words[:1].upper() + words[1:]


def called(title: str) -> str:
    """A heading as part of a sentence; capitalized abbreviations stay as they are."""
    return title if title[1:2].isupper() else title[:1].lower() + title[1:]
