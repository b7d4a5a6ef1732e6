"""Measurements in words: values at each depth, what a depth loses, and a headline for a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from everydepth.reports.reading import RunView
from everydepth.results import Result
from everydepth.results.figures.kinds import short_names
from everydepth.results.result import called, numbers
from everydepth.results.table import shown

CLOSE = 0.01  # shares: one point
NEAR = 1.1  # anything else: ten percent
MOST_SERIES = 6  # values in one sentence; the table of numbers has all

UNDEFINED = "undefined here"


# -- the value at each depth -----------------------------------------------------------------------


def by_depth(result: Result) -> list[str]:
    """One text per depth 0..L; empty if the result does not depend on depth."""
    if result.axis not in ("depth", "layer"):
        return []
    if result.kind == "histogram":
        return _shares(result)
    if "text" in result.arrays and result.kind == "curve":
        return _texts(result)
    if result.kind in ("curve", "bars") and len(result.series) <= MOST_SERIES:
        names = short_names(result)
        values = {names[name]: result.at_depth(name) for name in result.series}
    elif result.kind == "family" and result.value.shape[1] <= MOST_SERIES:
        word = result.label("columns")
        columns = zip(np.asarray(result.arrays["columns"]), numbers(result.value).T, strict=True)
        places = [int(x) for x in result.x()]
        values = {
            f"{word} {shown(x.item())}:": {d: float(v) for d, v in zip(places, line, strict=True)}
            for x, line in columns
        }
    else:
        return []
    last = max(int(result.x(name).max()) for name in result.series)
    alone = len(values) == 1
    return [
        ", ".join(
            f"{'' if alone else f'{name} '}{quantity(found[depth], result.unit)}"
            for name, found in values.items()
            if depth in found
        )
        or UNDEFINED
        for depth in range(last + 1)
    ]


def _shares(result: Result) -> list[str]:
    counts = result.at_depth()
    total, so_far = max(sum(counts.values()), 1), 0.0
    found: list[str] = []
    for depth in range(max(counts) + 1):
        here = 100 * counts.get(depth, 0.0) / total
        so_far += here
        found.append(f"{here:.1f}% here, {so_far:.1f}% so far")
    return found


def _texts(result: Result) -> list[str]:
    """The text written at each depth; with several prompts, the first."""
    depths = [int(depth) for depth in result.x()]
    first = np.asarray(result.arrays["text"]).reshape(len(depths), -1)[:, 0]
    written = dict(zip(depths, map(str, first), strict=True))
    return [written.get(depth, UNDEFINED) for depth in range(max(depths) + 1)]


def quantity(value: float, unit: str = "", digits: int = 4) -> str:
    """A number with its unit, formatted for reading."""
    if unit == "share":
        return f"{100 * value:.1f}%"
    if unit in ("bytes", "count", "FLOP"):
        return shown(value, unit)
    number = f"{value:.{digits}g}" if abs(value) < 1e5 else f"{value:.2e}"
    return f"{number} {unit}".rstrip()


# -- what a depth loses ----------------------------------------------------------------------------


def gives_up(view: RunView) -> list[str]:
    """One sentence per depth 0..L on quality and cost; empty if neither was measured."""
    found = [texts for result in _telling(view) if (texts := _against_full(result))]
    return [
        "; ".join(texts[k] for texts in found if k < len(texts) and texts[k]) + "."
        for k in range(max(map(len, found), default=0))
    ]


def _telling(view: RunView) -> Iterator[Result]:
    """The main measurement of quality in each of a run's Results, then that of cost.

    Of several with the same title, the one with the most depths.
    """
    for is_cost in (False, True):
        told: dict[str, Result] = {}
        for results in view.answers.values():
            every = (r for r in results.results.values() if _is_judged(r))
            first = next((r for r in every if (r.section == "cost") == is_cost), None)
            if first is not None:
                other = told.get(first.title)
                if other is None or len(first.at_depth()) > len(other.at_depth()):
                    told[first.title] = first
        yield from told.values()


def _is_judged(result: Result) -> bool:
    """Whether it is a curve over depth of quality or cost."""
    is_curve = result.kind == "curve" and result.axis == "depth" and not result.is_gap
    is_judged = result.better is not None and result.section in ("prediction", "cost")
    return is_curve and is_judged and bool(result.at_depth())


def _against_full(result: Result) -> list[str]:
    values = result.at_depth()
    last = max(values)
    full, name = values[last], called(result.title)
    say = _cost if result.section == "cost" else _points if _is_share(result) else _times
    return [
        say(name, values[depth], full, depth == last, result)
        if depth in values
        else ("" if depth < min(values) else f"{name} is {UNDEFINED}")
        for depth in range(last + 1)
    ]


def _cost(name: str, value: float, full: float, is_full: bool, result: Result) -> str:
    return f"{100 * value / full:.0f}% of the {name}" if full else ""


def _points(name: str, value: float, full: float, is_full: bool, result: Result) -> str:
    level = f"{100 * value:.1f}% {name}"
    gap = 100 * (full - value) * (1 if result.better == "higher" else -1)
    if is_full:
        return f"{level} at full depth"
    if abs(gap) < 0.05:
        return f"{level}, as good as full depth"
    return f"{level}, {abs(gap):.1f} points {'worse' if gap > 0 else 'better'} than full depth"


def _times(name: str, value: float, full: float, is_full: bool, result: Result) -> str:
    level = f"{name} {quantity(value, result.unit, 3)}"
    if is_full or full <= 0:
        return level
    return f"{level}, {quantity(value / full, digits=3)} times that of full depth"


def _is_share(result: Result) -> bool:
    return result.unit == "share"


# -- a run in a sentence ---------------------------------------------------------------------------


def enough(view: RunView) -> int | None:
    """The smallest depth nearly as good as the last: within a point, or ten percent."""
    result = _main(view)
    if result is None:
        return None
    values = result.at_depth()
    full = values[max(values)]
    near = (lambda v: v >= full - CLOSE) if _is_share(result) else (lambda v: v >= full / NEAR)
    if result.better == "lower":
        near = (lambda v: v <= full + CLOSE) if _is_share(result) else (lambda v: v <= full * NEAR)
    return next(depth for depth, value in sorted(values.items()) if near(value))


def headline(view: RunView) -> str:
    """A headline for the run: how good it is, and from which depth on."""
    result, depth = _main(view), enough(view)
    if result is None or depth is None:
        other = [str(results) for results in view.answers.values() if results.kind != "training"]
        return f"{'; '.join(other)}." if other else "has not been measured."
    values = result.at_depth()
    last, name = max(values), called(result.title)
    level = quantity(values[last], result.unit, 3)
    if depth == last:
        return f"needs all of its {last} blocks for {name} {level}."
    near = "1 point" if _is_share(result) else "10%"
    return f"is within {near} of its full {name} ({level}) at depth {depth} of {last}."


def start_depth(views: Sequence[RunView], last: int) -> int:
    """The initial depth of the dial: the smallest that suffices for one of the runs."""
    depths = [depth for view in views if (depth := enough(view)) is not None]
    return min([last, *depths])


def _main(view: RunView) -> Result | None:
    return next((result for result in _telling(view) if result.section != "cost"), None)
