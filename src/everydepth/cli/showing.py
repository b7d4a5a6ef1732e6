"""How commands show results and keep them: the same for every verb."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everydepth.environment import command_line
from everydepth.errors import RunError
from everydepth.files import untaken

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

    from everydepth.results import Results, Table

_BLOCKS = "▁▂▃▄▅▆▇█"
_MOST_ROWS = 40


def show(results: Results, console: Console) -> None:
    """Print the main table, or a summary of it if it does not fit the terminal.

    Measurements of one number per layer and setting cannot share a table: each gets its own.
    """
    main = results.main
    if main.kind == "family":
        for name, result in results.results.items():
            if result.kind == main.kind:
                show_table(results.table(name), console)
        return
    table = results.table()
    width = max(map(len, str(replace(table, title="", notes=())).splitlines()))
    fits = width <= console.width and len(table.rows) <= _MOST_ROWS
    show_table(table, console, None if fits else summary(results))


def show_table(table: Table, console: Console, body: RichTable | None = None) -> None:
    """Print one table, or `body` in its place, between its title and its notes."""
    # A table narrower than its title and notes would fold them.
    console.print(table.title, markup=False)
    console.print(body or replace(table, title="", notes=()))
    for note in table.notes:
        console.print(note, markup=False, style="yellow")


def summary(results: Results) -> RichTable:
    """One row per curve: how it runs along its axis, and its lowest, highest and last value."""
    from rich.table import Table as RichTable
    from rich.text import Text

    from everydepth.results.layout import is_line, merged

    main = results.main
    lines = [r for r in results.results.values() if is_line(r) and r.axis == main.axis]
    table = merged(lines or [main], main, "", every=True)
    shown = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column("", no_wrap=True, overflow="ellipsis")
    axis = f"{main.axis} {table.rows[0][0]} to {table.rows[-1][0]}"
    # Where the terminal is narrow this one is folded: numbers are never cut.
    shown.add_column(Text(axis), overflow="fold")
    for title in ("lowest", "highest", "last"):
        shown.add_column(title, justify="right", no_wrap=True, min_width=8)
    for place, name in enumerate(table.headings[1:], start=1):
        column = [row[place] for row in table.rows]
        values = [v for v in column if isinstance(v, int | float) and math.isfinite(v)]
        if values:
            cells = [f"{number:.4g}" for number in (min(values), max(values), values[-1])]
            # A result's further series stand below it. Text, not markup: a name may hold brackets.
            first, _, series = name.partition(".")
            shown.add_row(Text(f"  {series}" if series else first), sparkline(column), *cells)
    return shown


def sparkline(values: Sequence[Any]) -> str:
    """A block per value, as high as the value among the others; blank where there is none."""
    finite = [v for v in values if isinstance(v, int | float) and math.isfinite(v)]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)

    def block(value: Any) -> str:
        if not isinstance(value, int | float) or not math.isfinite(value):
            return " "
        return _BLOCKS[round((value - low) / span * (len(_BLOCKS) - 1)) if span else 0]

    return "".join(map(block, values))


def place_for(model: str, run: Path | None, kind: str) -> Path:
    """Where results go: `run`, the model's own run, or a new directory below runs."""
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
    """An error if a new run cannot be made there: before the work instead of after it."""
    if run is not None and run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise RunError(f"{run} is not an empty directory; use another one with --run")


def keep(results: Results, place: Path | None, asked: Mapping[str, Any], console: Console) -> None:
    """Save results into the run directory `place`, made if it is new; say how to see them.

    place: None saves nothing.
    """
    from everydepth.runs import Run

    if place is None:
        return
    command = command_line()
    if not Run.exists(place):
        Run.create(place, {"command": command, **asked}, kind=results.kind)
    folder = results.with_about(command=command, asked=asked).save(place / results.kind)
    console.print(f"wrote {folder}; see it with: everydepth report {place}", markup=False)
