"""Charts as Plotly figures.

Plotly interprets some HTML tags, so text that may come from data is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from everydepth.results.figures.chart import (
    DASHES,
    PALETTE,
    Array,
    Axis,
    Bars,
    Boxes,
    Chart,
    Heat,
    Line,
    Mark,
)

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

INK, GRID = "#3b4252", "#e6e8ec"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def draw(charts: Sequence[Chart]) -> Figure:
    """The charts in rows of two."""
    from plotly.graph_objects import Figure

    return Figure(description(charts))


def description(charts: Sequence[Chart]) -> dict[str, Any]:
    """The figure as plain lists and dictionaries, for `Plotly.newPlot`."""
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "font": {"family": FONT, "size": 12, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 8, "t": 28, "b": 8},
        "colorway": list(PALETTE),
        "showlegend": any(chart.legend for chart in charts),
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "hovermode": "closest" if any(chart.is_heat for chart in charts) else "x unified",
        "barmode": "group",
        "boxmode": "group",
        "annotations": [],
    }
    rows, columns = -(-len(charts) // 2), min(2, len(charts))
    for place, chart in enumerate(charts):
        number = "" if place == 0 else str(place + 1)
        left, right = _span(place % 2, columns, gap=0.16)
        bottom, top = _span(rows - 1 - place // 2, rows, gap=0.24 / rows)
        square = chart.is_heat and chart.x.whole and chart.y.whole
        fixed = {"constrain": "domain"} if square else {}
        bar = {"x": right, "y": (bottom + top) / 2, "len": top - bottom}
        for mark in chart.marks:
            trace = _trace(mark, bar) | {"xaxis": f"x{number}", "yaxis": f"y{number}"}
            if trace.get("name") in {other.get("name") for other in data if _listed(other)}:
                trace["showlegend"] = False  # the same name in an earlier chart
            data.append(trace)
        layout[f"xaxis{number}"] = _axis(chart.x, heat=chart.is_heat, vertical=False) | {
            "domain": [left, right],
            "anchor": f"y{number}",
            **fixed,
            **_whole_steps(chart.x, [mark.x for mark in chart.marks]),
        }
        layout[f"yaxis{number}"] = _axis(chart.y, heat=chart.is_heat, vertical=True) | {
            "domain": [bottom, top],
            "anchor": f"x{number}",
            **fixed,
            **_whole_steps(chart.y, [mark.y for mark in chart.marks if isinstance(mark, Heat)]),
            **({"scaleanchor": f"x{number}"} if square else {}),
        }
        if len(charts) > 1:
            layout["annotations"].append(_heading(chart.title, (left + right) / 2, top))
    if len(charts) == 1:
        layout["title"] = {"text": escape(charts[0].title), "font": {"size": 13}, "x": 0.02}
    else:
        layout |= {"height": 360 * rows, "margin": {"l": 8, "r": 8, "t": 56, "b": 8}}
        layout["legend"] |= {"yref": "container", "y": 1, "yanchor": "top"}
    return {"data": data, "layout": layout}


def _listed(trace: dict[str, Any]) -> bool:
    return trace["type"] != "heatmap" and trace.get("showlegend", True)


def _span(place: int, count: int, gap: float) -> tuple[float, float]:
    """Start and end of one of `count` equal parts of 0..1."""
    width = (1 - gap * (count - 1)) / count
    return place * (width + gap), place * (width + gap) + width


def _heading(title: str, x: float, y: float) -> dict[str, Any]:
    place = {"x": x, "y": y, "xref": "paper", "yref": "paper", "xanchor": "center"}
    return place | {"text": escape(title), "showarrow": False, "yanchor": "bottom"}


def _trace(mark: Mark, bar: dict[str, float]) -> dict[str, Any]:
    if isinstance(mark, Heat):
        return _heat(mark, bar)
    color = PALETTE[mark.color % len(PALETTE)]
    common: dict[str, Any] = {"name": escape(mark.name), "x": plain(mark.x)}
    if isinstance(mark, Line):
        found = common | {
            "type": "scatter",
            "mode": "lines+markers" if mark.markers else "lines",
            "y": plain(mark.y),
            "line": {"color": color, "dash": DASHES[mark.dash % len(DASHES)], "width": 2},
            "marker": {"size": 5, "color": color},
        }
        if mark.low is not None and mark.high is not None:
            found["error_y"] = {
                "type": "data",
                "symmetric": False,
                "array": plain(mark.high - mark.y),
                "arrayminus": plain(mark.y - mark.low),
                "thickness": 1,
                "width": 0,
            }
        return found
    if isinstance(mark, Bars):
        written = {"texttemplate": "%{y:.3g}"} if mark.values else {}
        return common | written | {"type": "bar", "y": plain(mark.y), "marker": {"color": color}}
    if isinstance(mark, Boxes):
        names = ("lowerfence", "q1", "median", "q3", "upperfence")
        levels = {name: plain(row) for name, row in zip(names, mark.quantiles, strict=True)}
        # The line through the boxes stands for them in the legend.
        drawn = {"type": "box", "line": {"color": color, "width": 1.5}, "showlegend": False}
        return common | levels | drawn
    return common | {
        "type": "scatter",
        "mode": "markers+text" if mark.text else "markers",
        "y": plain(mark.y),
        "text": [escape(text) for text in mark.text],
        "textposition": "top center",
        "cliponaxis": False,  # a label may extend beyond the edge
        "marker": {"size": 8, "color": color},
    }


def _heat(heat: Heat, bar: dict[str, float]) -> dict[str, Any]:
    low, high = heat.color_range
    written: dict[str, Any] = {}
    if heat.text:
        written = {
            "text": [[escape(text) for text in line] for line in heat.text],
            "texttemplate": "%{text}",
            "hovertemplate": "%{text}: %{z:.3g}<extra></extra>",
        }
    return written | {
        "type": "heatmap",
        "z": [plain(row) for row in heat.z],
        "x": plain(heat.x),
        "y": plain(heat.y),
        "zmin": low,
        "zmax": high,
        "colorscale": "PuOr" if heat.diverging else "Viridis",
        "hoverongaps": False,
        "colorbar": {
            "thickness": 10,
            "outlinewidth": 0,
            **bar,
            "title": {"text": escape(heat.unit), "side": "right"},
        },
    }


def _axis(axis: Axis, *, heat: bool, vertical: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "title": {"text": _wrapped(axis.title), "font": {"size": 12}, "standoff": 6},
        "automargin": True,
        "gridcolor": GRID,
        "zeroline": False,
        "showgrid": vertical and not heat,
        "ticks": "" if heat else "outside",
        "tickcolor": GRID,
        "linecolor": GRID,
        "showline": not heat,
    }
    if axis.log:
        found |= {"type": "log", "exponentformat": "power", "dtick": 1}
    elif axis.ticks:
        step = max(1, len(axis.ticks) // 24)
        found |= {
            "tickvals": list(range(0, len(axis.ticks), step)),
            "ticktext": [escape(text) for text in axis.ticks[::step]],
        }
    return found


def _whole_steps(axis: Axis, values: Sequence[Any]) -> dict[str, Any]:
    """Ticks at integers only, about eight at most."""
    if not axis.whole or axis.log or axis.ticks:
        return {}
    least = max((float(np.ptp(v)) for v in values if len(v)), default=0.0) / 8
    scale = 10 ** math.floor(math.log10(max(least, 1)))
    step = next(n * scale for n in (1, 2, 5, 10) if n * scale >= least)
    return {"tickformat": "d", "tick0": 0, "dtick": step}


def _wrapped(text: str) -> str:
    return "<br>".join(escape(line) for line in wrap(text, 34))


def plain(values: Array) -> list[float | int | None]:
    """Numbers as JSON values: six digits, and null if not finite."""
    numbers = np.asarray(values)
    if numbers.dtype.kind in "iub":
        return [int(value) for value in numbers]
    return [float(f"{v:.6g}") if np.isfinite(v) else None for v in numbers.astype(float)]
