"""The Results tab: whatever was measured of a run, one page for each of its Results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everydepth.app.shelf import Shelf
from everydepth.errors import DataError, SettingError
from everydepth.reports.markup import table, text
from everydepth.reports.reading import read
from everydepth.results import Results


def answers(shelf: Shelf, run: str) -> Mapping[str, Results]:
    """The Results of a run by its name on the shelf."""
    if run not in shelf.runs():
        known = ", ".join(shelf.runs())
        raise DataError(f"{run[:80]!r} is not a run here; choose from {known}")
    return read(shelf[run].path, run).answers


def first(results: Results) -> str | None:
    """The measurement to show first; None if there is none with values."""
    return None if all(r.is_gap for r in results.results.values()) else results.main.name


def words(results: Results, name: str | None) -> str:
    """One measurement in words and numbers, or all in one table."""
    result = None if name is None else results.result(name)
    about = str(results) if result is None else result.about
    shown = results.table(name)
    notes = "".join(f'<p class="ed-words">{text(note)}</p>' for note in shown.notes)
    rows = f'<div class="ed-rows">{table(shown.heads, shown.cells)}</div>' if shown.rows else ""
    return f'<p class="ed-words">{text(about)}</p>{rows}{notes}'


def figure(results: Results, name: str | None) -> Any:
    """Its figure; None if it is a table to be read."""
    try:
        return None if name is None else results.plot(name, backend="plotly")
    except SettingError:
        return None
