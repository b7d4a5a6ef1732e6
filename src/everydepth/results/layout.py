"""From results to tables: one function a kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from everydepth.results.result import Result
from everydepth.results.table import Cell, Table, cell, shown

LINES = ("curve", "histogram", "bars", "scatter")
"""Kinds with one value per position of their axis."""


def table_of(result: Result) -> Table:
    """The table of one result: every number it shows."""
    notes = (result.note,) if result.note else ()
    if result.is_gap:
        return Table(headings=(result.name,), rows=(), title=result.title, notes=notes)
    if result.kind in LINES:
        heads, units, rows = _lines(result)
    elif result.kind in ("matrix", "family"):
        heads, units, rows = _matrix(result)
    elif result.kind == "grid":
        heads, units, rows = _grid(result)
    elif result.kind == "scalar":
        heads, units = ("what", "value"), ("", "")
        rows = [
            (result.label(n), cell(np.ma.asarray(result.arrays[n]).flat[0])) for n in result.series
        ]
    else:
        heads = tuple(result.label(name) for name in result.series)
        units = ("",) * len(heads)
        rows = list(zip(*(cells(result.arrays[n]) for n in result.series), strict=True))
    return Table(headings=heads, rows=tuple(rows), units=units, title=result.title, notes=notes)


def merged(results: Sequence[Result], title: str) -> Table:
    """One row per position of the axis that most results share, one column a result.

    Single numbers stand below, with the notes; where no result has an axis, the first is shown.
    """
    present = [r for r in results if not r.is_gap]
    lines = [r for r in present if r.kind in LINES and f"{r.series[0]}_{r.axis}" not in r.arrays]
    notes = (
        [
            f"{r.label(n)} {shown(cell(np.ma.asarray(r.arrays[n]).flat[0]))}"
            for r in present
            if r.kind == "scalar"
            for n in r.series
        ]
        if lines
        else []
    )
    notes += [f"{r.name}: {r.note}" for r in results if r.note]
    if not lines:
        first = next(iter(present), None)
        found = Table(headings=(), rows=()) if first is None else table_of(first)
        return Table(
            headings=found.headings,
            rows=found.rows,
            units=found.units,
            title=title,
            notes=tuple(notes),
        )
    axis = lines[0].axis
    lines = [r for r in lines if r.axis == axis]
    columns = [dict(zip(cells(r.x()), cells(r.value), strict=True)) for r in lines]
    places = list(dict.fromkeys(x for column in columns for x in column))
    if all(isinstance(x, int | float) for x in places):
        places.sort(key=lambda x: x if isinstance(x, int | float) else 0)
    return Table(
        headings=(axis, *(r.name for r in lines)),
        rows=tuple((x, *(column.get(x) for column in columns)) for x in places),
        units=("", *(r.unit for r in lines)),
        title=title,
        notes=tuple(notes),
    )


def cells(values: Any) -> list[Cell]:
    """The values of one column."""
    return [cell(value) for value in np.ma.asarray(values)]


_Parts = tuple[tuple[str, ...], tuple[str, ...], list[tuple[Cell, ...]]]


def _lines(result: Result) -> _Parts:
    own = [n for n in result.series if f"{n}_{result.axis}" in result.arrays]
    if own:  # every series has positions of its own: one row a point
        rows = [
            (result.label(n), x, y)
            for n in result.series
            for x, y in zip(cells(result.x(n)), cells(result.arrays[n]), strict=True)
        ]
        return ("series", result.axis, result.name), ("", "", result.unit), rows
    columns = [cells(result.x()), *(cells(result.arrays[name]) for name in result.series)]
    one = len(result.series) == 1
    heads = (result.axis, *(result.name if one else name for name in result.series))
    units = ("", result.unit, *("" for _ in result.series[1:]))
    return heads, units, list(zip(*columns, strict=True))


def _matrix(result: Result) -> _Parts:
    rows = result.x()
    columns = cells(result.arrays.get("columns", rows))
    heads = (result.axis, *(shown(column) for column in columns))
    values = np.ma.asarray(result.value)
    lines = [(x, *cells(line)) for x, line in zip(cells(rows), values, strict=True)]
    return heads, ("", *(result.unit for _ in columns)), lines


def _grid(result: Result) -> _Parts:
    text = np.asarray(result.arrays["text"]).astype(str)
    tokens = result.arrays.get("tokens", np.arange(text.shape[1]))
    rows: list[tuple[Cell, ...]] = [
        (x, *map(str, line)) for x, line in zip(cells(result.x()), text, strict=True)
    ]
    return (result.axis, *map(str, tokens)), (), rows
