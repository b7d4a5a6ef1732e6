"""`report`: from runs to an HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from everydepth.config import checked
from everydepth.errors import DataError
from everydepth.files import explained, untaken, write_bytes
from everydepth.reports.page import LARGEST_PAGE, render
from everydepth.reports.reading import RunView, read, view_of
from everydepth.results import Results

Source = str | Path | Results
"""A run directory, a folder written by `Results.save`, or results themselves."""


@checked
def report(
    runs: Source | Sequence[Source] | Mapping[str, Source],
    out: str | Path = "report.html",
    *,
    title: str = "What each depth gives",
    command: str | None = None,
) -> Path:
    """Write one HTML page that compares the runs, and return its path.

    runs: one, several, or several by name. A run is a directory written by an everydepth command, a
        folder written by `Results.save`, or `Results` of any verb.
    command: the command that made the page, to be shown on it.

    >>> trace = ed.trace(model, test, ["accuracy"], progress=False)
    >>> ed.report({"my model": trace}, "page.html").name
    'page.html'
    """
    views = _views(runs)
    page = render(views, title, command).encode("utf-8")
    if len(page) > LARGEST_PAGE:
        raise DataError(
            f"the page would have {len(page) / 1e6:.1f} MB, but {LARGEST_PAGE / 1e6:.0f} MB is the "
            f"limit; report fewer than {len(views)} run(s) at once, or measure less"
        )
    path = Path(out)
    with explained("the page cannot be written", DataError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, page)
    return path


def _views(runs: Source | Sequence[Source] | Mapping[str, Source]) -> list[RunView]:
    if isinstance(runs, Mapping):
        found = [_view(source, name) for name, source in runs.items()]
    else:
        several = [runs] if isinstance(runs, str | Path | Results) else runs
        found = [_view(source, None) for source in several]
    if not found:
        raise DataError("there are no runs; give at least one run directory or Results")
    return _named_apart(found)


def _view(source: Source, name: str | None) -> RunView:
    return view_of(source, name) if isinstance(source, Results) else read(source, name)


def _named_apart(views: Sequence[RunView]) -> list[RunView]:
    found: dict[str, RunView] = {}
    for view in views:
        name = untaken(view.name, found)
        found[name] = replace(view, name=name)
    return list(found.values())
