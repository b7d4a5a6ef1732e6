"""Figures of results: with matplotlib for print, with Plotly for the web.

`kinds` turns a result into charts (marks on two axes), depending on its `kind`; `mpl` and `web`
draw any chart. A new measurement needs nothing here, a new kind one function in `kinds`, a new mark
one branch in each of `mpl` and `web`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from everydepth.errors import SettingError
from everydepth.results.figures.chart import Chart
from everydepth.results.figures.kinds import charts
from everydepth.results.result import Result

BACKENDS = ("matplotlib", "plotly")


def figure(result: Result | Mapping[str, Result], backend: str = "matplotlib") -> Any:
    """The figure of a result, or of the same measurement in several runs, by name.

    backend: "matplotlib" returns a `matplotlib.figure.Figure` half a page wide, ready for
    `savefig`; "plotly" a `plotly.graph_objects.Figure`. Each is imported only when needed.
    """
    return _drawn(charts({"": result} if isinstance(result, Result) else result), backend)


def sheet(results: Sequence[Result], backend: str = "matplotlib", *, strict: bool = True) -> Any:
    """All results in one figure, in rows of two.

    strict: raise an error for one that cannot be drawn (a gap, a table of text) instead of leaving
    it out.
    """
    found: list[Chart] = []
    for result in results:
        try:
            found += charts({"": result})
        except SettingError:
            if strict:
                raise
    if not found:
        names = ", ".join(result.name for result in results) or "nothing"
        raise SettingError(f"{names}: nothing here can be drawn; use .table()")
    return _drawn(found, backend)


def _drawn(drawn: Sequence[Chart], backend: str) -> Any:
    if backend not in BACKENDS:
        raise SettingError(f"backend {backend!r}; use {' or '.join(map(repr, BACKENDS))}")
    if backend == "plotly":
        from everydepth.results.figures import web

        return web.draw(drawn)
    from everydepth.results.figures import mpl

    return mpl.draw(drawn)
