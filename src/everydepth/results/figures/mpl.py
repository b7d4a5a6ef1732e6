"""Charts as matplotlib figures for print: half a page wide, 8 pt, embedded fonts.

Without pyplot or global settings, so it does not interfere with the caller's figures or threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from textwrap import fill
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

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

WIDTH, HEIGHT = 3.3, 2.4  # inches; half a page of two columns
_STYLE: Mapping[Any, Any] = MappingProxyType(
    {
        "font.size": 8,
        "axes.titlesize": 8,
        "axes.labelsize": 8,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
        "legend.fontsize": 7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "axes.grid": False,
        "lines.linewidth": 1.3,
        "lines.markersize": 3,
        "text.usetex": False,
        "pdf.fonttype": 42,  # some journals reject type 3 fonts, the default
        "ps.fonttype": 42,
    }
)
_PATTERNS = dict(zip(DASHES, ("-", "--", ":", "-."), strict=True))


class PrintFigure(Figure):
    """A figure that is written in the style it was drawn in."""

    def savefig(self, *args: Any, **options: Any) -> None:
        with rc_context(dict(_STYLE)):  # the font type of a PDF is decided on writing
            super().savefig(*args, **options)


def draw(charts: Sequence[Chart]) -> Figure:
    """The charts in rows of two, each half a page wide."""
    rows, columns = -(-len(charts) // 2), min(2, len(charts))
    width, height = (max(sizes) for sizes in zip(*map(_size, charts), strict=True))
    with rc_context(dict(_STYLE)):
        figure = PrintFigure(figsize=(width * columns, height * rows), layout="constrained")
        places = figure.subplots(rows, columns, squeeze=False).flat
        for axes, chart in zip_longest(places, charts):
            if chart is None:
                axes.remove()
            else:
                _fill(axes, chart)
    return figure


def _size(chart: Chart) -> tuple[float, float]:
    """Width and height in inches; cells with text need more room."""
    texts = [mark.text for mark in chart.marks if isinstance(mark, Heat) and mark.text]
    if not texts:
        return WIDTH, HEIGHT
    return max(WIDTH, 1.3 + 0.42 * len(texts[0][0])), max(HEIGHT, 1 + 0.16 * len(texts[0]))


def _fill(axes: Axes, chart: Chart) -> None:
    for mark in chart.marks:
        _draw_mark(axes, mark, [other for other in chart.marks if type(other) is type(mark)])
    # Text may come from data: a dollar sign is a dollar sign, not math.
    axes.set_title(chart.title, parse_math=False)
    axes.set_xlabel(chart.x.title, parse_math=False)
    axes.set_ylabel(fill(chart.y.title, 34), parse_math=False)
    _scale(axes, "x", chart.x, heat=chart.is_heat)
    _scale(axes, "y", chart.y, heat=chart.is_heat)
    if chart.legend:
        legend = axes.legend(edgecolor="none", framealpha=0.8, handlelength=1.8, borderaxespad=0.2)
        for text in legend.get_texts():
            text.set_parse_math(False)


def _draw_mark(axes: Axes, mark: Mark, like: Sequence[Mark]) -> None:
    if isinstance(mark, Heat):
        _draw_heat(axes, mark)
        return
    color = PALETTE[mark.color % len(PALETTE)]
    if isinstance(mark, Line):
        pattern = _PATTERNS[DASHES[mark.dash % len(DASHES)]]
        shape = "o" if mark.markers else None
        axes.plot(mark.x, mark.y, color=color, linestyle=pattern, marker=shape, label=mark.name)
        if mark.low is not None and mark.high is not None:
            axes.fill_between(mark.x, mark.low, mark.high, color=color, alpha=0.15, linewidth=0)
    elif isinstance(mark, Bars):
        x, width = _beside(mark, like)
        drawn = axes.bar(x, mark.y, width, color=color, label=mark.name)
        if mark.values:
            axes.bar_label(drawn, fmt="%.3g", fontsize=7)
    elif isinstance(mark, Boxes):
        names = ("whislo", "q1", "med", "q3", "whishi")
        stats: list[dict[str, Any]] = [
            dict(zip(names, column, strict=True)) for column in mark.quantiles.T
        ]
        line = {"color": color, "linewidth": 0.8}
        x, width = _beside(mark, like)
        axes.bxp(
            stats,
            positions=x,
            widths=0.8 * width,
            showfliers=False,
            manage_ticks=False,
            **dict.fromkeys(("boxprops", "whiskerprops", "capprops", "medianprops"), line),
        )
    else:
        axes.scatter(mark.x, mark.y, s=14, color=color, label=mark.name, linewidths=0)
        for x, y, text in zip(mark.x, mark.y, mark.text, strict=False):
            axes.annotate(
                text, (x, y), (2, 2), textcoords="offset points", fontsize=6, parse_math=False
            )


def _draw_heat(axes: Axes, heat: Heat) -> None:
    low, high = heat.color_range
    colors = "PuOr" if heat.diverging else "viridis"
    rows, columns = heat.z.shape
    image = axes.imshow(
        np.ma.masked_invalid(heat.z),
        origin="lower",
        cmap=colors,
        vmin=low,
        vmax=high,
        aspect="equal" if rows == columns else "auto",
        extent=(heat.x[0] - 0.5, heat.x[-1] + 0.5, heat.y[0] - 0.5, heat.y[-1] + 0.5),
    )
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.figure.colorbar(image, ax=axes, label=heat.unit, shrink=0.9)
    for y, line, values in zip(heat.y, heat.text, heat.z, strict=False):
        for x, text, value in zip(heat.x, line, values, strict=True):
            bright = not np.isfinite(value) or (value - low) / ((high - low) or 1) > 0.6
            axes.text(
                x,
                y,
                text if len(text) <= 8 else f"{text[:7]}…",
                ha="center",
                va="center",
                size=5,
                color="black" if bright else "white",
                parse_math=False,
            )


def _scale(axes: Axes, which: str, axis: Axis, *, heat: bool) -> None:
    side: Any = axes.xaxis if which == "x" else axes.yaxis
    if axis.log:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    elif axis.ticks:
        step = max(1, len(axis.ticks) // 12)
        labels = [text[:12] for text in axis.ticks[::step]]
        turn = 60 if which == "x" and max(map(len, labels)) > 3 else 0
        side.set_ticks(range(0, len(axis.ticks), step), labels, rotation=turn, parse_math=False)
    elif axis.whole:
        side.set_major_locator(MaxNLocator(8, integer=True))
    elif max(map(abs, side.get_view_interval())) >= 1e4:
        side.set_major_formatter(EngFormatter(sep=""))  # 800k, as the page has it
    if not heat and which == "y" and not axis.log:
        side.grid(True, linewidth=0.4, color="#dddddd")
        axes.set_axisbelow(True)


def _beside(mark: Bars | Boxes, like: Sequence[Mark]) -> tuple[Array, float]:
    """The positions and the width of one mark's bars among those of the others."""
    spacing = float(np.diff(mark.x).min()) if len(mark.x) > 1 else 1.0
    width = 0.8 / len(like) * spacing
    return mark.x + (like.index(mark) - (len(like) - 1) / 2) * width, width
