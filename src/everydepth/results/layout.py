"""From results to tables: one function per kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from everydepth.results.result import Result
from everydepth.results.table import Cell, Table, cell, in_heading, shown

ERROR = "standard_error"  # an array beside the first series, shown as a column of its own


def table_of(result: Result) -> Table:
    """The table of one result."""
    notes = (result.note,) if result.note else ()
    if result.is_gap:
        return Table(headings=(result.name,), rows=(), title=result.title, notes=notes)
    if result.kind in ("curve", "histogram", "bars", "scatter"):
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
    title = result.title
    if result.kind in ("matrix", "family") and in_heading(result.unit):
        title += f" ({result.unit})"  # once, instead of over every column
    return Table(headings=heads, rows=tuple(rows), units=units, title=title, notes=notes)


def merged(results: Sequence[Result], main: Result, title: str, *, every: bool = False) -> Table:
    """One row per x of the main result, and one column for each result that shares its axis.

    Single numbers go below, with the notes. If the main result has no such axis, the table is of
    this result alone. every: include all series, not only the first of each result.
    """
    notes = tuple(f"{r.name}: {r.note}" for r in results if r.note)
    if not is_line(main):
        alone = table_of(main)
        title = "\n".join(line for line in (title, alone.title) if line)
        return replace(alone, title=title, notes=notes)
    lines = [r for r in results if is_line(r) and r.axis == main.axis]
    columns: dict[str, dict[Cell, Cell]] = {}
    for r in lines:
        for name in r.series if every else r.series[:1]:
            heading = r.name if name == r.series[0] else f"{r.name}.{name}"
            columns[heading] = dict(zip(cells(r.x(name)), cells(r.arrays[name]), strict=True))
        if ERROR in r.arrays:
            columns[f"± {r.name}"] = dict(zip(cells(r.x()), cells(r.arrays[ERROR]), strict=True))
    places = list(dict.fromkeys(x for column in columns.values() for x in column))
    if not any(isinstance(x, str) for x in places):
        places.sort(key=lambda x: float(x or 0))
    units = {r.name: r.unit for r in lines}
    return Table(
        headings=(main.axis, *columns),
        rows=tuple((x, *(column.get(x) for column in columns.values())) for x in places),
        units=("", *(units.get(heading, "") for heading in columns)),
        title=title,
        notes=(*_single_numbers(results), *notes),
    )


def is_line(result: Result) -> bool:
    """Whether it has one value per x of an axis that others may share."""
    shared = not any(f"{name}_{result.axis}" in result.arrays for name in result.series)
    return result.kind in ("curve", "histogram", "bars") and not result.is_gap and shared


def _single_numbers(results: Sequence[Result]) -> list[str]:
    return [
        f"{r.label(name)}: {shown(cell(np.ma.asarray(r.arrays[name]).flat[0]))}"
        for r in results
        if r.kind == "scalar"
        for name in r.series
    ]


def cells(values: Any) -> list[Cell]:
    """The values of one column."""
    return [cell(value) for value in np.ma.asarray(values)]


_Parts = tuple[tuple[str, ...], tuple[str, ...], list[tuple[Cell, ...]]]


def _lines(result: Result) -> _Parts:
    own = [n for n in result.series if f"{n}_{result.axis}" in result.arrays]
    if own:  # every series has its own x values: one row per point
        rows = [
            (result.label(n), x, y)
            for n in result.series
            for x, y in zip(cells(result.x(n)), cells(result.arrays[n]), strict=True)
        ]
        return ("series", result.axis, result.name), ("", "", result.unit), rows
    series = result.series
    heads = [result.axis, *([result.name] if len(series) == 1 else series)]
    if ERROR in result.arrays:
        series, heads = (*series, ERROR), [*heads, f"± {result.name}"]
    columns = [cells(result.x()), *(cells(result.arrays[name]) for name in series)]
    units = ("", result.unit, *("" for _ in series[1:]))
    return tuple(heads), units, list(zip(*columns, strict=True))


def _matrix(result: Result) -> _Parts:
    rows = result.x()
    columns = cells(result.arrays.get("columns", rows))
    word = result.labels.get("columns", "").split(" (")[0]  # without the unit: "depth 3"
    word = f"{word} " if word else ""
    heads = (result.axis, *(f"{word}{shown(column)}" for column in columns))
    values = np.ma.asarray(result.value)
    lines = [(x, *cells(line)) for x, line in zip(cells(rows), values, strict=True)]
    return heads, ("", *("" if in_heading(result.unit) else result.unit for _ in columns)), lines


def _grid(result: Result) -> _Parts:
    text = np.asarray(result.arrays["text"]).astype(str)
    tokens = result.arrays.get("tokens", np.arange(text.shape[1]))
    rows: list[tuple[Cell, ...]] = [
        (x, *map(str, line)) for x, line in zip(cells(result.x()), text, strict=True)
    ]
    return (result.axis, *map(str, tokens)), (), rows
