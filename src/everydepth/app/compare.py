"""The Compare tab: two runs in one report."""

from __future__ import annotations

from everydepth.app.shelf import Shelf
from everydepth.reports.page import render
from everydepth.reports.reading import read


def page(shelf: Shelf, first: str, second: str) -> str:
    """The report of two runs, given by their names on the shelf and never by paths."""
    names = [first] if first == second else [first, second]
    return render([read(shelf.run(name).path, name) for name in names], " against ".join(names))


def start(shelf: Shelf) -> tuple[str | None, str | None]:
    """The two runs to show first; preferably the same model trained in two ways."""
    runs = shelf.runs()
    for name in runs:
        other = name.replace("lpa", "end-to-end")
        if other != name and other in runs:
            return other, name
    return (runs[0], runs[-1]) if runs else (None, None)
