"""The figure of every result: for paper through matplotlib, for the screen through Plotly.

A result says by its `kind` how it is laid out. `kinds` turns it into charts (marks on two axes),
`mpl` and `web` draw any chart. A new metric needs nothing here; a new kind is one function in
`kinds`, a new mark one branch in each of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from everydepth.errors import SettingError
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
    """The figure of a result, or of the same metric of several runs by their names.

    backend: "matplotlib" gives a `matplotlib.figure.Figure` half a page wide, ready for `savefig`;
    "plotly" a `plotly.graph_objects.Figure`. Neither is imported before it is needed.
    """
    if backend not in BACKENDS:
        raise SettingError(f"backend {backend!r}; use {' or '.join(map(repr, BACKENDS))}")
    drawn = charts({"": result} if isinstance(result, Result) else result)
    if backend == "plotly":
        from everydepth.results.figures import web

        return web.draw(drawn)
    from everydepth.results.figures import mpl

    return mpl.draw(drawn)
