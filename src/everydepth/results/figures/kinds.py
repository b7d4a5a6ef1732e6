"""From results to charts: one function per kind, the same for one run and for several.

Lines and bars of several runs share a chart, one color per run; matrices and grids stand side by
side and share a color scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from everydepth.errors import SettingError
from everydepth.results.figures.chart import (
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
from everydepth.results.layout import cells
from everydepth.results.result import Kind, Result, called, numbers
from everydepth.results.table import shown

# Words in labels of quantities between nothing and all, which never get a logarithmic axis.
_SHARES = ("%", "accuracy", "diversity", "fraction", "probability", "share")
MOST_MARKERS = 60  # points per line; more markers would hide it
MOST_COLUMNS = 7  # lines per family; more would be indistinguishable
POINTS_KEPT = 400  # per line; a screen shows no more
QUANTILES = ("q05", "q25", "q50", "q75", "q95")

Runs = Mapping[str, Result]
"""The same measurement in one or more runs, by name of the run."""


def charts(runs: Runs, title: str | None = None) -> tuple[Chart, ...]:
    """The charts of one measurement; gaps are left out, but only gaps is an error."""
    drawn = {run: _in_percent(result) for run, result in runs.items() if not result.is_gap}
    if not drawn:
        first = next(iter(runs.values()))
        raise SettingError(f"{first.name} cannot be drawn: {first.note}; measure again without it")
    first = next(iter(drawn.values()))
    return _BY_KIND[first.kind](drawn, first.title if title is None else title)


def _in_percent(result: Result) -> Result:
    """Shares in percent; anything else unchanged."""
    if result.unit != "share" or result.kind not in ("curve", "family", "bars", "scatter"):
        return result
    shares = {*QUANTILES, *(n + end for n in result.series for end in ("", "_low", "_high"))}
    arrays = {k: 100 * numbers(v) if k in shares else v for k, v in result.arrays.items()}
    return replace(result, arrays=arrays, unit="%")


def _label(result: Result, name: str) -> str:
    """The name of an array, with its unit."""
    label = result.label(name)
    if name in result.series:
        if name not in result.labels and len(result.series) == 1:
            label = called(result.title)
        if result.unit not in ("", "count", label) and not _unit(label):
            return f"{label} ({result.unit})"
    return label


def short_names(result: Result, names: Sequence[str] | None = None) -> dict[str, str]:
    """Short names for the series: as few words of each label as keep them distinct."""
    labels = {n: _bare(_label(result, n)) for n in (result.series if names is None else names)}
    first = {n: label.partition(": ")[0] for n, label in labels.items()}
    for brief in ({n: label.partition(", ")[0] for n, label in first.items()}, first):
        if len(set(brief.values())) == len(brief):
            return brief
    return labels


def number_columns(result: Result) -> list[str]:
    """The columns of a table that hold numbers."""
    return [name for name in result.series if result.arrays[name].dtype.kind in "fiub"]


def _curve(runs: Runs, title: str) -> tuple[Chart, ...]:
    """One chart per quantity; several quantities become a row of small charts."""
    first = next(iter(runs.values()))
    groups: dict[str, list[str]] = {}
    for name in first.series:
        groups.setdefault(_quantity(first, name), []).append(name)
    whole = len(groups) == 1
    found = [_lines(runs, names, title, whole=whole) for names in groups.values()]
    return (*found, *_maps(runs))


def _maps(runs: Runs) -> Iterator[Chart]:
    """The last map of a result that has one at every x."""
    for run, result in runs.items():
        name = result.meta.get("maps")
        if name is None:
            continue
        z = numbers(result.arrays[name])[-1]
        rows, columns = (np.arange(size) for size in z.shape)
        place = Axis(label=result.labels.get("maps", ""), whole=True)
        words = f"{result.label(name)} at the last {result.axis}"
        yield Chart(
            title=" · ".join(filter(None, (run, words))),
            x=place,
            y=place,
            marks=(Heat(z=z, x=columns, y=rows, unit=result.label(name)),),
        )


def _quantity(result: Result, name: str) -> str:
    """Series with the same quantity share an axis: the words after a colon, or the unit."""
    label = _label(result, name)
    _, colon, quantity = label.partition(": ")
    return quantity if colon else _unit(label) or label


def _lines(runs: Runs, names: Sequence[str], title: str, *, whole: bool = True) -> Chart:
    first = next(iter(runs.values()))
    alone = len(names) == 1
    short = short_names(first, None if alone else names)
    marks: list[Mark] = []
    for place, (run, result) in enumerate(runs.items()):
        boxed = names[0] == result.series[0] and all(q in result.arrays for q in QUANTILES)
        if boxed:
            spread = np.stack([numbers(result.arrays[q]) for q in QUANTILES])
            known = np.isfinite(numbers(result.arrays[names[0]])) & np.isfinite(spread).all(0)
            box = Boxes(x=result.x()[known], quantiles=spread[:, known], name=run, color=place)
            marks.append(box)
        for order, name in enumerate(names):
            if name not in result.arrays:
                continue
            words = (run if len(runs) > 1 else "", "" if alone else short[name])
            every = -(-len(result.x(name)) // POINTS_KEPT)
            line = Line(
                x=result.x(name)[::every],
                y=numbers(result.arrays[name])[::every],
                low=_optional(result, f"{name}_low", every),
                high=_optional(result, f"{name}_high", every),
                name=" · ".join(filter(None, words)),
                color=place if len(runs) > 1 else order,
                dash=order,
                markers=len(result.x(name)) <= MOST_MARKERS,
            )
            marks.append(line)
    label = _shared_label(first, names)
    values = [mark.y for mark in marks if isinstance(mark, Line)]
    return Chart(
        title=title if whole else short[names[0]] if alone else _bare(label),
        x=_x_axis(first),
        y=_axis(label, log=_spans_decades(label, values)),
        marks=tuple(marks),
        dial=_dial(first),
    )


def _family(runs: Runs, title: str) -> tuple[Chart, ...]:
    """One chart per series, with a line for every column."""
    first = next(iter(runs.values()))
    found: list[Chart] = []
    for name in first.series:
        lines = {run: _columns_as_series(r, name) for run, r in runs.items() if name in r.arrays}
        one = next(iter(lines.values()))
        chart = _lines(
            lines, one.series, title if len(first.series) == 1 else _bare(first.label(name))
        )
        label = _label(first, name)
        values = [mark.y for mark in chart.marks if isinstance(mark, Line)]
        found.append(replace(chart, y=_axis(label, log=_spans_decades(label, values))))
    return tuple(found)


def _columns_as_series(result: Result, name: str) -> Result:
    word = result.label("columns")
    names = [f"{word} {shown(x)}" for x in cells(result.arrays["columns"])]
    few = len(names) <= MOST_COLUMNS
    places = range(len(names)) if few else sorted({0, len(names) // 2, len(names) - 1})
    columns = {str(i): names[i] for i in places}
    arrays: dict[str, Any] = {result.axis: result.x()}
    for end in ("", "_low", "_high"):
        if f"{name}{end}" in result.arrays:
            values = np.ma.asarray(result.arrays[f"{name}{end}"])
            arrays |= {f"{i}{end}": values[:, int(i)] for i in columns}
    kept = {result.axis: result.label(result.axis)}
    series = tuple(columns)
    return replace(result, kind="curve", series=series, arrays=arrays, labels={**kept, **columns})


def _bars(runs: Runs, title: str) -> tuple[Chart, ...]:
    """Bars over numbers or text."""
    first = next(iter(runs.values()))
    words = tuple(map(str, first.x())) if first.x().dtype.kind == "U" else ()
    short = short_names(first)
    marks = [
        Bars(
            x=np.arange(len(words)) if words else r.x(),
            y=numbers(r.arrays[name]),
            name=" · ".join(filter(None, (run, short[name] if len(r.series) > 1 else ""))),
            color=place if len(runs) > 1 else order,
        )
        for place, (run, r) in enumerate(runs.items())
        for order, name in enumerate(r.series)
    ]
    x = Axis(label=first.label(first.axis), ticks=words) if words else _x_axis(first)
    chart = Chart(
        title=title,
        x=x,
        y=_axis(_shared_label(first, first.series)),
        marks=tuple(marks),
        dial=_dial(first),
    )
    return (chart,)


def _scatter(runs: Runs, title: str) -> tuple[Chart, ...]:
    """Points, labeled if they have names; a line joins those on the front."""
    first = next(iter(runs.values()))
    found: list[Chart] = []
    for name in first.series:
        marks: list[Mark] = []
        for place, (run, r) in enumerate(runs.items()):
            x, y = numbers(r.x(name)), numbers(r.arrays[name])
            if "front" in r.arrays:
                front = np.flatnonzero(r.arrays["front"])
                front = front[np.argsort(x[front])]
                line = Line(x=x[front], y=y[front], name=f"{run} unbeaten".strip(), color=place)
                marks.append(replace(line, markers=False))
            text = tuple(map(str, r.arrays["text"])) if "text" in r.arrays else ()
            marks.append(Dots(x=x, y=y, name=run, text=text, color=place))
        across, up = first.label(first.axis), _label(first, name)
        dots = [mark for mark in marks if isinstance(mark, Dots)]
        chart = Chart(
            title=title if len(first.series) == 1 else _bare(up),
            x=_axis(across, log=_spans_decades(across, [mark.x for mark in dots])),
            y=_axis(up, log=_spans_decades(up, [mark.y for mark in dots])),
            marks=tuple(marks),
        )
        found.append(chart)
    return tuple(found)


def _rows(runs: Runs, title: str) -> tuple[Chart, ...]:
    first = next(iter(runs.values()))
    raise SettingError(f"{first.name} is a table for reading; use .table({first.name!r})")


def _optional(result: Result, name: str, every: int) -> Array | None:
    return numbers(result.arrays[name])[::every] if name in result.arrays else None


def _dial(result: Result) -> Literal["x"] | None:
    """Layer l produces depth l, so either can be highlighted."""
    return "x" if result.axis in ("depth", "layer") else None


def _shared_label(result: Result, names: Sequence[str]) -> str:
    """The label of the axis: the quantity that the series share, with its unit."""
    label = _label(result, names[0])
    if len(names) == 1 and ": " not in label:
        return label
    quantity = _quantity(result, names[0])
    if quantity != _unit(label):
        return quantity
    return f"{called(result.title)} ({quantity})"


def _histogram(runs: Runs, title: str) -> tuple[Chart, ...]:
    marks: list[Mark] = []
    for place, (run, result) in enumerate(runs.items()):
        depth = result.x()
        counts = numbers(result.value)
        share = 100 * counts / max(float(np.nansum(counts)), 1.0)
        several = len(runs) > 1
        marks.append(Bars(x=depth, y=share, name=run if several else "at this depth", color=place))
        if "cumulative" in result.arrays:
            line = Line(
                x=depth,
                y=100 * numbers(result.arrays["cumulative"]),
                name=f"{run} · up to here" if several else "up to here",
                color=place if several else 1,
                dash=1,
            )
            marks.append(line)
    first = next(iter(runs.values()))
    chart = Chart(
        title=title,
        x=_x_axis(first),
        y=Axis(label="share", unit="%"),
        marks=tuple(marks),
        dial=_dial(first),
    )
    return (chart,)


def _matrix(runs: Runs, title: str) -> tuple[Chart, ...]:
    found: list[Chart] = []
    for name in next(iter(runs.values())).series:
        maps = {run: r for run, r in runs.items() if name in r.arrays}
        low, high = _shared_range([numbers(result.arrays[name]) for result in maps.values()])
        for run, result in maps.items():
            rows = result.x()
            columns = np.asarray(result.arrays.get("columns", rows))
            label = result.labels.get(name, result.labels.get("value", result.name))
            one = len(result.series) == 1
            words = (run if len(runs) > 1 else title, "" if one else short_names(result)[name])
            chart = Chart(
                title=" · ".join(filter(None, words)),
                x=_axis(result.labels.get("columns", result.label(result.axis)), True),
                y=_x_axis(result),
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
                dial="both" if _dial(result) else None,
            )
            found.append(chart)
    spread = _to_the_last(runs, title)
    return (*found, *([spread] if spread else []))


def _to_the_last(runs: Runs, title: str) -> Chart | None:
    """The spread of samples in the last column, if the result has quantiles."""
    last: dict[str, Result] = {}
    for run, result in runs.items():
        if all(name in result.arrays for name in QUANTILES):
            main = result.series[0]
            columns = {name: result.arrays[name][:, -1] for name in (main, *QUANTILES)}
            columns[result.axis] = result.x()
            last[run] = replace(result, kind="curve", series=(main,), arrays=columns)
    if not last:
        return None
    series = next(iter(last.values())).series
    return _lines(last, series, f"{title} with the last depth".strip())


def _grid(runs: Runs, title: str) -> tuple[Chart, ...]:
    found: list[Chart] = []
    for run, result in runs.items():
        text = np.asarray(result.arrays["text"]).astype(str)
        chance = numbers(result.arrays["probability"])
        inputs = result.arrays.get("tokens", np.arange(text.shape[1]))
        chart = Chart(
            title=run if len(runs) > 1 else title,
            x=Axis(label=result.labels.get("tokens", "token"), ticks=tuple(map(str, inputs))),
            y=_x_axis(result),
            marks=(
                Heat(
                    z=chance,
                    x=np.arange(text.shape[1]),
                    y=result.x(),
                    low=0.0,
                    high=1.0,
                    unit="probability",
                    text=tuple(tuple(map(str, line)) for line in text),
                ),
            ),
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
            color=place,
            values=True,
        )
        for place, (run, r) in enumerate(runs.items())
    )
    chart = Chart(
        title=title,
        x=Axis(label="", ticks=tuple(name.replace("_", " ") for name in names)),
        y=_axis(first.labels.get("value", first.name)),
        marks=marks,
    )
    return (chart,)


def _table(runs: Runs, title: str) -> tuple[Chart, ...]:
    """Columns of numbers: a single one as a histogram, others against the first.

    If the first column increases, lines; if two columns are integers, a heat map of counts;
    otherwise points, labeled by the first column of text.
    """
    first = next(iter(runs.values()))
    columns = number_columns(first)
    if not columns:
        raise SettingError(
            f"{first.name} has columns {', '.join(first.series)}, none of which holds numbers; "
            f"use .table({first.name!r})"
        )
    across, *up = columns
    x = numbers(first.arrays[across])
    y = _axis(first.label(up[0]) if up else "share (%)")
    chart = Chart(title=title, x=_axis(first.label(across)), y=y, marks=())
    if not up:
        return (replace(chart, marks=tuple(_shares(runs, across))),)
    if bool(np.all(np.diff(x) > 0)):
        lines = {run: _over(r, "curve", across, up) for run, r in runs.items()}
        return (_lines(lines, up, title),)
    if all(first.arrays[name].dtype.kind in "iu" for name in (across, up[0])):
        return tuple(
            replace(chart, title=run or title, marks=(_counts(r, across, up[0]),))
            for run, r in runs.items()
        )
    return _scatter({run: _over(r, "scatter", across, up[:1]) for run, r in runs.items()}, title)


def _over(result: Result, kind: Kind, across: str, up: Sequence[str]) -> Result:
    """Columns of a table against one of them, labeled by the first column of text."""
    arrays = {name: result.arrays[name] for name in (across, *up)}
    if np.ma.is_masked(arrays[across]):
        arrays[across] = numbers(arrays[across])  # NaN is not drawn
    words = [name for name in result.series if name not in number_columns(result)]
    arrays |= {"text": result.arrays[words[0]]} if words else {}
    return replace(result, kind=kind, axis=across, series=tuple(up), arrays=arrays)


def _shares(runs: Runs, name: str) -> Iterator[Bars]:
    for place, (run, result) in enumerate(runs.items()):
        values, counts = np.unique(np.ma.compressed(result.arrays[name]), return_counts=True)
        yield Bars(x=values, y=100 * counts / counts.sum(), name=run, color=place)


def _counts(result: Result, across: str, up: str) -> Heat:
    x, y = (np.ma.asarray(result.arrays[name]) for name in (across, up))
    both = ~(np.ma.getmaskarray(x) | np.ma.getmaskarray(y))
    columns, rows = (np.arange(int(v[both].min()), int(v[both].max()) + 1) for v in (x, y))
    z = np.zeros((len(rows), len(columns)))
    np.add.at(z, (y[both] - rows[0], x[both] - columns[0]), 1)
    return Heat(z=np.where(z > 0, z, np.nan), x=columns, y=rows, unit="predictions")


_BY_KIND: Mapping[str, Callable[[Runs, str], tuple[Chart, ...]]] = {
    "curve": _curve,
    "family": _family,
    "bars": _bars,
    "scatter": _scatter,
    "rows": _rows,
    "matrix": _matrix,
    "histogram": _histogram,
    "grid": _grid,
    "scalar": _scalar,
    "table": _table,
}


def _x_axis(result: Result) -> Axis:
    default = "depth (blocks)" if result.axis == "depth" else result.label(result.axis)
    whole = result.x(result.series[0]).dtype.kind in "iu"
    return _axis(result.labels.get(result.axis, default), whole=whole)


def _axis(label: str, whole: bool = False, log: bool = False) -> Axis:
    return Axis(label=_bare(label), unit=_unit(label), whole=whole, log=log)


def _unit(label: str) -> str:
    """`nat` from `cross-entropy (nat)`."""
    start = label.rfind(" (")
    return label[start + 2 : -1] if label.endswith(")") and start > 0 else ""


def _bare(label: str) -> str:
    return label[: label.rfind(" (")] if _unit(label) else label


def _spans_decades(label: str, values: Sequence[Array]) -> bool:
    """Whether to use a logarithmic axis: all values positive, over more than three decades."""
    if any(word in label for word in _SHARES):
        return False
    every = np.concatenate([value[np.isfinite(value)] for value in values] or [np.zeros(0)])
    return bool(every.size) and float(every.min()) > 0 and float(every.max() / every.min()) > 1e3


def _shared_range(matrices: Sequence[Array]) -> tuple[float | None, float | None]:
    finite: list[Any] = [m[np.isfinite(m)] for m in matrices if np.isfinite(m).any()]
    if not finite:
        return None, None
    return min(float(m.min()) for m in finite), max(float(m.max()) for m in finite)
