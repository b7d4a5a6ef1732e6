"""Shorthands for the most common measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from everydepth.config import brief, checked
from everydepth.errors import DataError
from everydepth.results.result import Kind, Result, defined

Values = Sequence[Any] | np.ndarray


@checked
def curve(
    name: str,
    x: Values,
    y: Values | Mapping[str, Values],
    *,
    axis: str = "depth",
    kind: Kind = "curve",
    low: Values | None = None,
    high: Values | None = None,
    labels: Mapping[str, str] | None = None,
    **words: Any,
) -> Result:
    """One or more series over an axis; NaN is masked.

    kind: "curve" or another kind with the same layout: "bars", "scatter", or "histogram", whose
        cumulative share is added.
    low, high: the band around a single series. words: other fields of `Result`.

    >>> from everydepth.results import curve
    >>> time = curve("latency", [1, 2], [3.0, 5.5], low=[2.9, 5.1], high=[3.2, 6.0], unit="ms")
    >>> time.series, sorted(time.arrays)
    (('value',), ['depth', 'value', 'value_high', 'value_low'])
    """
    several = dict(y) if isinstance(y, Mapping) else {"value": y}
    if not several:
        raise DataError(f"{name}: y is an empty mapping; give the values of one series or more")
    arrays = {axis: np.array(as_array(x))} | {
        key: defined(as_array(values)) for key, values in several.items()
    }
    if low is not None and high is not None:
        first = next(iter(several))
        arrays |= {f"{first}_low": as_array(low), f"{first}_high": as_array(high)}
    if kind == "histogram":
        counts = as_array(next(iter(several.values())), float)
        arrays["cumulative"] = counts.cumsum() / max(float(counts.sum()), 1.0)
    return Result(
        name=name,
        kind=kind,
        axis=axis,
        series=tuple(several),
        arrays=arrays,
        labels=labels or {},
        **words,
    )


@checked
def lines(
    name: str,
    series: Mapping[str, Mapping[str, Values]],
    *,
    axis: str,
    of: str,
    labels: Mapping[str, str] | None = None,
    **words: Any,
) -> Result:
    """Curves that each have x values of their own: by name, `x`, `y`, and perhaps `low` and `high`.

    of: what all of them measure.

    >>> from everydepth.results.build import lines
    >>> found = lines("loss", {"a": {"x": [1, 2], "y": [3.0, 2.0]}}, axis="step", of="loss")
    >>> found.x("a").tolist(), found.label("a")
    ([1, 2], 'a: loss')
    """
    ends = {"x": f"_{axis}", "y": "", "low": "_low", "high": "_high"}
    return Result(
        name=name,
        kind="curve",
        axis=axis,
        series=tuple(series),
        arrays={
            f"{key}{ends[part]}": np.array(as_array(values))
            for key, parts in series.items()
            for part, values in parts.items()
        },
        labels={**{key: f"{key}: {of}" for key in series}, **(labels or {})},
        **words,
    )


@checked
def scalars(name: str, values: Mapping[str, float | int | None], **words: Any) -> Result:
    """Single numbers by name; those that are None are left out.

    >>> from everydepth.results import scalars
    >>> scalars("speed", {"measured": 1.5, "by_layers": 1.6, "unknown": None}).series
    ('measured', 'by_layers')
    """
    arrays = {key: np.array(float(value)) for key, value in values.items() if value is not None}
    return Result(name=name, kind="scalar", series=tuple(arrays), arrays=arrays, **words)


@checked
def rows(name: str, columns: Mapping[str, Sequence[Any]], **words: Any) -> Result:
    """A table for reading: columns of text or numbers, of equal length.

    >>> from everydepth.results import rows
    >>> rows("verdicts", {"site": [0, 1], "verdict": ["no", "deepen here"]}).series
    ('site', 'verdict')
    """
    arrays: dict[str, np.ndarray] = {}
    for key, values in columns.items():
        known = ["" if v is None else v for v in values] if _is_words(values) else values
        arrays[key] = as_array(known).copy()
    return Result(name=name, kind="rows", series=tuple(arrays), arrays=arrays, **words)


def _is_words(values: Sequence[Any]) -> bool:
    return any(isinstance(value, str) for value in values)


def as_array(values: Any, dtype: type | None = None) -> np.ndarray:
    """As an array; None becomes NaN, which is masked."""
    if isinstance(values, np.ma.MaskedArray):
        return values
    try:
        found = np.asarray(values, dtype=dtype)
        return defined(np.array(values, dtype=float)) if found.dtype.kind == "O" else found
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{brief(values)} is no array ({error}); give numbers or words, in rows of equal length"
        ) from error
