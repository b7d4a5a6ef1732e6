"""The figure of every result: for paper through matplotlib, for the screen through Plotly.

A result says by its `kind` how it is laid out. `kinds` turns it into charts (marks on two axes),
`mpl` and `web` draw any chart. A new measurement needs nothing here; a new kind is one function in
`kinds`, a new mark one branch in each of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from everydepth.errors import SettingError
from everydepth.results.figures.chart import Chart
from everydepth.results.figures.kinds import charts
from everydepth.results.result import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure as PaperFigure
    from plotly.graph_objects import Figure as WebFigure

BACKENDS = ("matplotlib", "plotly")


@overload
def figure(
    result: Result | Mapping[str, Result], backend: Literal["matplotlib"] = "matplotlib"
) -> PaperFigure: ...
@overload
def figure(result: Result | Mapping[str, Result], backend: Literal["plotly"]) -> WebFigure: ...
@overload
def figure(result: Result | Mapping[str, Result], backend: str) -> Any: ...
def figure(result: Result | Mapping[str, Result], backend: str = "matplotlib") -> Any:
    """The figure of a result, or of the same measurement of several runs by their names.

    backend: "matplotlib" gives a `matplotlib.figure.Figure` half a page wide, ready for `savefig`;
    "plotly" a `plotly.graph_objects.Figure`. Neither is imported before it is needed.
    """
    return _drawn(charts({"": result} if isinstance(result, Result) else result), backend)


def sheet(results: Sequence[Result], backend: str = "matplotlib", *, strict: bool = True) -> Any:
    """All results on one figure, in rows of two.

    strict: one that cannot be drawn (a gap, a table of words) is an error, else it is left out.
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
        raise SettingError(f"{names}: none of it can be drawn; use .table()")
    return _drawn(found, backend)


def _drawn(drawn: Sequence[Chart], backend: str) -> Any:
    if backend not in BACKENDS:
        raise SettingError(f"backend {backend!r}; use {' or '.join(map(repr, BACKENDS))}")
    if backend == "plotly":
        from everydepth.results.figures import web

        return web.draw(drawn)
    from everydepth.results.figures import mpl

    return mpl.draw(drawn)
