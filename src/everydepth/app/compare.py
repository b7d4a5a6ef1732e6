"""The Compare tab: two runs and all their curves, as one page of the report."""

from __future__ import annotations

from everydepth.app.shelf import Shelf
from everydepth.errors import DataError
from everydepth.reports.page import render
from everydepth.reports.reading import read


def page(shelf: Shelf, first: str, second: str) -> str:
    """The report of two runs by their names on the shelf; names, never paths, come from a page."""
    names = [first] if first == second else [first, second]
    known = shelf.runs()
    for name in names:
        if name not in known:
            raise DataError(f"{name[:80]!r} is not a run here; choose from {', '.join(known)}")
    return render([read(shelf[name].path, name) for name in names], " against ".join(names))


def start(shelf: Shelf) -> tuple[str | None, str | None]:
    """Which two to show first: two that are the same but for how they were trained."""
    runs = shelf.runs()
    for name in runs:
        other = name.replace("lpa", "end-to-end")
        if other != name and other in runs:
            return other, name
    return (runs[0], runs[-1]) if runs else (None, None)
