"""The Results tab: all measurements of a run, one page for each of its Results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everydepth.app.shelf import Shelf
from everydepth.errors import SettingError
from everydepth.reports.markup import table, text
from everydepth.reports.reading import read
from everydepth.results import Results


def answers(shelf: Shelf, run: str) -> Mapping[str, Results]:
    """The Results of a run, given by its name on the shelf."""
    return read(shelf.run(run).path, run).answers


def first(results: Results) -> str | None:
    """The measurement to show first; None if none has values."""
    return None if all(r.is_gap for r in results.results.values()) else results.main.name


def words(results: Results, name: str | None) -> str:
    """One measurement, or all of them, as text and a table."""
    result = None if name is None else results.result(name)
    about = str(results) if result is None else result.about
    shown = results.table(name)
    notes = "".join(f'<p class="ed-words">{text(note)}</p>' for note in shown.notes)
    rows = f'<div class="ed-rows">{table(shown.heads, shown.cells)}</div>' if shown.rows else ""
    return f'<p class="ed-words">{text(about)}</p>{rows}{notes}'


def figure(results: Results, name: str | None) -> Any:
    """The figure of a measurement; None if it is only a table."""
    try:
        return None if name is None else results.plot(name, backend="plotly")
    except SettingError:
        return None
