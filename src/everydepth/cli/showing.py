"""How commands print and save results; the same for every verb."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everydepth.environment import command_line
from everydepth.errors import RunError
from everydepth.files import untaken

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table as RichTable

    from everydepth.results import Results, Table

_BLOCKS = "▁▂▃▄▅▆▇█"
_MOST_ROWS = 40
_SHORT = 28  # longest cell, in characters, that shares a line with others


def show(results: Results, console: Console) -> None:
    """Print results: as many columns as fit the terminal, and the others as sparklines.

    Measurements with a number per layer and setting get a table each.
    """
    main = results.main
    if main.kind == "family":
        console.print(str(results), markup=False)
        for name, result in results.results.items():
            if result.kind == main.kind:
                show_table(results.table(name), console)
        return
    table = results.table()
    if not table.headings or table.headings[0] != main.axis:  # not a row per depth
        show_table(table, console)
        return
    console.print(table.title, markup=False)
    first = _columns_that_fit(table, console.width) if len(table.rows) <= _MOST_ROWS else 0
    if first > 1:
        console.print(_first_columns(table, first))
    if first < len(table.headings):
        console.print(summary(results, without=table.headings[1:first]))
    _show_notes(table, console)


def show_table(table: Table, console: Console) -> None:
    """Print a table with its title and notes; row by row if it is too wide."""
    console.print(table.title, markup=False)
    if _columns_that_fit(table, console.width) == len(table.headings):
        console.print(_first_columns(table, len(table.headings)))
    else:
        for row in table.cells:
            console.print(_entry(table.heads, row))
    _show_notes(table, console)


def _entry(heads: Sequence[str], cells: Sequence[str]) -> Group:
    """A row as a few lines: its first cell, then its short cells, then each longer one."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    first, *others = cells
    told = [(h, c) for h, c in zip(heads[1:], others, strict=True) if c not in ("", "-")]
    short = " · ".join(f"{head}: {cell}" for head, cell in told if len(cell) <= _SHORT)
    long = [f"{head}: {cell}" for head, cell in told if len(cell) > _SHORT]
    lines = [Padding(Text(line), (0, 0, 0, 2)) for line in (short, *long) if line]
    title = f"{heads[0]} {first}" if first.isdigit() else first
    return Group(Text(title, "bold"), *lines)


def _show_notes(table: Table, console: Console) -> None:
    for note in table.notes:
        console.print(note, markup=False, style="yellow")


def _first_columns(table: Table, number: int) -> Table:
    """The first columns of a table, without title and notes."""
    return replace(
        table,
        headings=table.headings[:number],
        rows=tuple(row[:number] for row in table.rows),
        units=table.units[:number],
        title="",
        notes=(),
    )


def _columns_that_fit(table: Table, width: int) -> int:
    columns = zip(table.heads, *table.cells, strict=True)
    ends = accumulate(max(map(len, column)) + 2 for column in columns)
    return sum(end - 2 <= width for end in ends)


def summary(results: Results, without: Collection[str] = ()) -> RichTable:
    """One row per curve: a sparkline, and its lowest, highest and last value.

    without: measurements whose first series is omitted.
    """
    from rich.table import Table as RichTable
    from rich.text import Text

    from everydepth.results.layout import is_line, merged
    from everydepth.results.table import shown as readable

    main = results.main
    lines = [r for r in results.results.values() if is_line(r) and r.axis == main.axis]
    table = merged(lines or [main], main, "", every=True)
    rows = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    rows.add_column("", no_wrap=True, overflow="ellipsis")
    axis = f"{main.axis} {table.rows[0][0]} to {table.rows[-1][0]}"
    # On a narrow terminal this column is folded, and numbers are never cut off.
    rows.add_column(Text(axis), overflow="fold")
    for title in ("lowest", "highest", "last"):
        rows.add_column(title, justify="right", no_wrap=True, min_width=8)
    for place, (name, head) in enumerate(zip(table.headings, table.heads, strict=True)):
        column = [row[place] for row in table.rows]
        values = [v for v in column if isinstance(v, int | float) and math.isfinite(v)]
        if place and values and name not in without:
            unit = table.units[place] if table.units else ""
            cells = [readable(v, unit) for v in (min(values), max(values), values[-1])]
            # A result's other series follow it. Text, not markup: names may contain brackets.
            first, _, series = name.partition(".")
            called = head if not series else f"  {series}" if first not in without else name
            rows.add_row(Text(called), sparkline(column), *cells)
    return rows


def sparkline(values: Sequence[Any]) -> str:
    """One block character per value, of relative height; blank if there is no number."""
    finite = [v for v in values if isinstance(v, int | float) and math.isfinite(v)]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)

    def block(value: Any) -> str:
        if not isinstance(value, int | float) or not math.isfinite(value):
            return " "
        return _BLOCKS[round((value - low) / span * (len(_BLOCKS) - 1)) if span else 0]

    return "".join(map(block, values))


def place_for(model: str, run: Path | None, kind: str) -> Path:
    """The directory for results: `run`, the model's own run, or a new one in runs."""
    from everydepth.runs import Run

    if run is None and Run.exists(model) and (Path(model) / "model").is_dir():
        return Path(model)
    if run is None:
        taken = [entry.name for entry in Path("runs").glob("*")]
        called = f"{kind}-{Path(model).resolve().name}"
        run = Path("runs") / untaken(called, taken, numbered="{}-{}")
    check_new(run)
    return run


def check_new(run: Path | None) -> None:
    """Raise an error if no run can be created there: before the work, not after it."""
    if run is not None and run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise RunError(f"{run} is not an empty directory; give a new one with --run")


def keep(results: Results, place: Path | None, asked: Mapping[str, Any], console: Console) -> None:
    """Save results in the run directory `place`, created if needed; None saves nothing."""
    from everydepth.runs import Run

    if place is None:
        return
    command = command_line()
    if not Run.exists(place):
        Run.create(place, {"command": command, **asked}, kind=results.kind)
    folder = results.with_about(command=command, asked=asked).save(place / results.kind)
    console.print(f"wrote {folder}; see it with: everydepth report {place}", markup=False)
