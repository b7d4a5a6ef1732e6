"""From results to charts: one function a kind, the same for one run and for several.

Several runs share a chart, one colour each, where lines and bars allow it; matrices and grids stand
side by side on one scale of colours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from everydepth.errors import SettingError
from everydepth.tracing.figures.chart import (
    Array,
    Axis,
    Bars,
    Boxes,
    Chart,
    Dots,
    Heat,
    Line,
    Mark,
)
from everydepth.tracing.result import Result

_SHARES = ("%", "fraction", "share")  # units in which nothing to all is the natural range
QUANTILES = ("q05", "q25", "q50", "q75", "q95")

Runs = Mapping[str, Result]
"""The same metric of one or more runs, by the name of the run."""


def charts(runs: Runs, title: str | None = None) -> tuple[Chart, ...]:
    """The charts of one metric; gaps are left out, and nothing but gaps is an error."""
    drawn = {run: result for run, result in runs.items() if not result.is_gap}
    if not drawn:
        first = next(iter(runs.values()))
        raise SettingError(f"{first.name} cannot be drawn: {first.note}; trace it again without")
    first = next(iter(drawn.values()))
    heading = first.name.replace("_", " ") if title is None else title
    return _BY_KIND[first.kind](drawn, heading)


def numbers(values: Array) -> Array:
    """Floats with NaN where a value is undefined: both backends leave a gap there."""
    return np.ma.filled(np.ma.asarray(values).astype(float), np.nan)


def _curve(runs: Runs, title: str) -> tuple[Chart, ...]:
    return tuple(_lines(runs, names, title) for names in _by_unit(runs))


def _by_unit(runs: Runs) -> list[tuple[str, ...]]:
    """The series, those of one unit together: a nat and a percentage do not share an axis."""
    first = next(iter(runs.values()))
    groups: dict[str, list[str]] = {}
    for name in first.series:
        groups.setdefault(_unit(first.labels.get(name, "")), []).append(name)
    return [tuple(names) for names in groups.values()]


def _lines(runs: Runs, names: Sequence[str], title: str) -> Chart:
    first = next(iter(runs.values()))
    alone = len(names) == 1
    marks: list[Mark] = []
    for place, (run, result) in enumerate(runs.items()):
        depth = np.asarray(result.arrays["depth"])
        boxed = names[0] == result.series[0] and all(q in result.arrays for q in QUANTILES)
        if boxed:
            spread = np.stack([numbers(result.arrays[q]) for q in QUANTILES])
            marks.append(Boxes(x=depth, quantiles=spread, name=run, colour=place))
        for order, name in enumerate(names):
            if name not in result.arrays:
                continue
            words = (run if len(runs) > 1 else "", "" if alone else _bare(result.label(name)))
            line = Line(
                x=depth,
                y=numbers(result.arrays[name]),
                name=run if boxed and alone else " · ".join(filter(None, words)),
                colour=place if len(runs) > 1 else order,
                dash=order,
            )
            marks.append(line)
    values = [mark.y for mark in marks if isinstance(mark, Line)]
    own = first.labels.get(names[0])
    label = own if alone and own else first.labels.get("value", own or first.name)
    heading = (
        title if len(first.series) == len(names) else f"{title}: {_bare(first.label(names[0]))}"
    )
    return Chart(
        title=heading,
        x=_depth_axis(first),
        y=_axis(label, log=_unit(label) not in _SHARES and _spans_decades(values)),
        marks=tuple(marks),
        note=first.note or "",
        dial="x",
    )


def _histogram(runs: Runs, title: str) -> tuple[Chart, ...]:
    marks: list[Mark] = []
    for place, (run, result) in enumerate(runs.items()):
        depth = np.asarray(result.arrays["depth"])
        counts = numbers(result.value)
        share = 100 * counts / max(float(np.nansum(counts)), 1.0)
        several = len(runs) > 1
        marks.append(Bars(x=depth, y=share, name=run if several else "at this depth", colour=place))
        if "cumulative" in result.arrays:
            line = Line(
                x=depth,
                y=100 * numbers(result.arrays["cumulative"]),
                name=f"{run} · up to here" if several else "up to here",
                colour=place if several else 1,
                dash=1,
            )
            marks.append(line)
    first = next(iter(runs.values()))
    chart = Chart(
        title=title,
        x=_depth_axis(first),
        y=Axis(label="share", unit="%"),
        marks=tuple(marks),
        note=first.note or "",
        dial="x",
    )
    return (chart,)


def _matrix(runs: Runs, title: str) -> tuple[Chart, ...]:
    found: list[Chart] = []
    for name in next(iter(runs.values())).series:
        maps = {run: r for run, r in runs.items() if name in r.arrays}
        low, high = _shared_range([numbers(result.arrays[name]) for result in maps.values()])
        for run, result in maps.items():
            rows = np.asarray(result.arrays["depth"])
            columns = np.asarray(result.arrays.get("columns", rows))
            label = result.labels.get(name, result.labels.get("value", result.name))
            words = (run if len(runs) > 1 else title, name if len(result.series) > 1 else "")
            chart = Chart(
                title=" · ".join(filter(None, words)),
                x=_axis(result.labels.get("columns", result.labels.get("depth", "depth")), True),
                y=_depth_axis(result),
                marks=(
                    Heat(
                        z=numbers(result.arrays[name]),
                        x=columns,
                        y=rows,
                        low=low,
                        high=high,
                        unit=label,
                    ),
                ),
                note=result.note or "",
                dial="both",
            )
            found.append(chart)
    return tuple(found)


def _grid(runs: Runs, title: str) -> tuple[Chart, ...]:
    found: list[Chart] = []
    for run, result in runs.items():
        text = np.asarray(result.arrays["text"]).astype(str)
        chance = numbers(result.arrays["probability"])
        inputs = result.arrays.get("tokens", np.arange(text.shape[1]))
        chart = Chart(
            title=run if len(runs) > 1 else title,
            x=Axis(label=result.labels.get("tokens", "token"), ticks=tuple(map(str, inputs))),
            y=_depth_axis(result),
            marks=(
                Heat(
                    z=chance,
                    x=np.arange(text.shape[1]),
                    y=np.asarray(result.arrays["depth"]),
                    low=0.0,
                    high=1.0,
                    unit="probability",
                    text=tuple(tuple(map(str, line)) for line in text),
                ),
            ),
            note=result.note or "",
            dial="y",
        )
        found.append(chart)
    return tuple(found)


def _scalar(runs: Runs, title: str) -> tuple[Chart, ...]:
    first = next(iter(runs.values()))
    names = first.series
    marks = tuple(
        Bars(
            x=np.arange(len(names)),
            y=np.array([float(numbers(r.arrays[n]).flat[0]) for n in names]),
            name=run,
            colour=place,
        )
        for place, (run, r) in enumerate(runs.items())
    )
    chart = Chart(
        title=title,
        x=Axis(label="", ticks=tuple(first.label(name) for name in names)),
        y=_axis(first.labels.get("value", first.name)),
        marks=marks,
        note=first.note or "",
    )
    return (chart,)


def _table(runs: Runs, title: str) -> tuple[Chart, ...]:
    """The first two columns of numbers against each other; the first column of words names them."""
    first = next(iter(runs.values()))
    columns = [name for name in first.series if first.arrays[name].dtype.kind in "fiub"]
    words = [name for name in first.series if name not in columns]
    if len(columns) < 2:
        raise SettingError(
            f"{first.name} has columns {', '.join(first.series)}, of which {len(columns)} hold "
            "numbers, and a figure needs two; read it with trace.results"
        )
    across, up = columns[:2]
    marks = tuple(
        Dots(
            x=numbers(r.arrays[across]),
            y=numbers(r.arrays[up]),
            name=run,
            text=tuple(map(str, r.arrays[words[0]])) if words else (),
            colour=place,
        )
        for place, (run, r) in enumerate(runs.items())
    )
    chart = Chart(
        title=title,
        x=_axis(first.label(across)),
        y=_axis(first.label(up)),
        marks=marks,
        note=first.note or "",
        dial="x" if across == "depth" else None,
    )
    return (chart,)


_BY_KIND: Mapping[str, Callable[[Runs, str], tuple[Chart, ...]]] = {
    "curve": _curve,
    "matrix": _matrix,
    "histogram": _histogram,
    "grid": _grid,
    "scalar": _scalar,
    "table": _table,
}


def _depth_axis(result: Result) -> Axis:
    return _axis(result.labels.get("depth", "depth (block)"), whole=True)


def _axis(label: str, whole: bool = False, log: bool = False) -> Axis:
    return Axis(label=_bare(label), unit=_unit(label), whole=whole, log=log)


def _unit(label: str) -> str:
    """`nat` of `cross-entropy (nat)`."""
    start = label.rfind("(")
    return label[start + 1 : -1] if label.endswith(")") and start > 0 else ""


def _bare(label: str) -> str:
    return label[: label.rfind("(")].rstrip() if _unit(label) else label


def _spans_decades(values: Sequence[Array]) -> bool:
    """Whether a logarithmic axis reads better: all positive, and three decades or more."""
    every = np.concatenate([value[np.isfinite(value)] for value in values] or [np.zeros(0)])
    return bool(every.size) and float(every.min()) > 0 and float(every.max() / every.min()) > 1e3


def _shared_range(matrices: Sequence[Array]) -> tuple[float | None, float | None]:
    finite: list[Any] = [m[np.isfinite(m)] for m in matrices if np.isfinite(m).any()]
    if not finite:
        return None, None
    return min(float(m.min()) for m in finite), max(float(m.max()) for m in finite)
