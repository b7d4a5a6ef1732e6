"""Panels: what a page shows of one result, by the result's name.

A panel is a small function that takes the same result of every run, by the name of the run, and
returns a `Panel`. What a trace measured arrives as a `Result`; what another command wrote into
results.json arrives as the plain JSON it is. To add one:

    @panel("exits", section="decisions")
    def exits(runs):
        return Panel(
            title="Who leaves where",
            about="Share of samples that leave at each depth.",
            charts=(Chart(...),),
            readings={run: ["12 % leave here", ...] for run in runs},    # one text per depth
            gives_up={run: ["runs in 41 % of the time", ...] for run in runs},
        )

`readings` stand under the chart and follow the dial; `gives_up` joins the sentence beside the dial.
A result without a panel of its own is drawn by its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from everydepth.errors import SettingError
from everydepth.results.figures.chart import Chart
from everydepth.results.figures.kinds import charts, number_columns, numbers, short_names
from everydepth.results.figures.web import description
from everydepth.results.result import Result

MOST_READINGS = 6  # values in one line of words; more are in the table of numbers

SECTIONS: Mapping[str, str] = {
    "prediction": "What each depth predicts",
    "cost": "What each depth costs",
    "decisions": "Where decisions are made",
    "blocks": "What each block adds",
    "similarity": "How alike the depths are",
    "structure": "How the classes separate",
    "gradients": "Gradients and statistics",
    "tokens": "What each depth would say",
    "growth": "Would more depth help?",
    "training": "How it was trained",
    "more": "More",
}

Texts = Mapping[str, Sequence[str]]
"""By run, one text per depth 0..L."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One card. `about` says in a sentence what is seen and how to read it.

    table: a row of headings, then rows of cells. notes: what is missing or to be read with care.
    """

    title: str
    about: str = ""
    charts: tuple[Chart, ...] = ()
    readings: Texts = field(default_factory=dict[str, Sequence[str]])
    gives_up: Texts = field(default_factory=dict[str, Sequence[str]])
    table: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()
    section: str = "more"


Drawing = Callable[[Mapping[str, Any]], Panel]

_registry: dict[str, tuple[str, Drawing]] = {}


def panel(name: str, *, section: str) -> Callable[[Drawing], Drawing]:
    """Register a function as the panel of the result called `name`; the last one wins."""
    if section not in SECTIONS:
        raise SettingError(f"section {section!r}; use one of {', '.join(SECTIONS)}")

    def register(drawing: Drawing) -> Drawing:
        _registry[name] = (section, drawing)
        return drawing

    return register


def registered() -> tuple[str, ...]:
    """The names that have a panel, in the order they were registered."""
    return tuple(_registry)


def draw(name: str, runs: Mapping[str, Any]) -> Panel | None:
    """The panel of one result; None for plain JSON that nobody said how to show."""
    if name in _registry:
        section, drawing = _registry[name]
    elif all(isinstance(result, Result) for result in runs.values()):
        section, drawing = "more", by_kind
    else:
        return None
    try:
        found = replace(drawing(runs), section=section)
        description(found.charts)  # so that charts that cannot be drawn are noticed here
        return found
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Files may come from anywhere: one result that does not look as it should is said, and
        # the others are still shown.
        why = f"{name} could not be drawn ({type(error).__name__}: {error})"
        return Panel(title=readable(name), notes=(why,), section=section)


def by_kind(
    runs: Mapping[str, Result], title: str | None = None, about: str = "", digits: int = 4
) -> Panel:
    """The charts that follow from the kind of the result, and its value at each depth in words."""
    present = {run: result for run, result in runs.items() if not result.is_gap}
    name = next(iter(runs.values())).name
    panel = Panel(title=title or readable(name), about=about, notes=notes_of(runs))
    if not present:
        return panel
    first = next(iter(present.values()))
    if first.kind == "table" and not number_columns(first):
        return replace(panel, table=_rows(present))
    drawn = charts(present, "")
    return replace(panel, charts=drawn, readings=readings(present, digits))


def notes_of(runs: Mapping[str, Result]) -> tuple[str, ...]:
    """What is missing; with the name of the run where not all runs miss the same."""
    notes = {run: result.note for run, result in runs.items() if result.note}
    if len(notes) == len(runs) and len(set(notes.values())) == 1:
        return (next(iter(notes.values())),)
    return tuple(f"{run}: {note}" for run, note in notes.items())


def readings(runs: Mapping[str, Result], digits: int = 4) -> dict[str, list[str]]:
    """The values of every curve at each depth, in words."""
    return {
        run: [_reading(result, depth, digits) for depth in range(_last_depth(result) + 1)]
        for run, result in runs.items()
        if result.kind in ("curve", "histogram") and len(result.series) <= MOST_READINGS
    }


def at_depth(result: Result, name: str) -> dict[int, float]:
    """Depth -> value of one array, where it is defined."""
    values = numbers(result.arrays[name])
    depths = np.asarray(result.arrays["depth"])
    return {int(d): float(v) for d, v in zip(depths, values, strict=True) if np.isfinite(v)}


def readable(name: str) -> str:
    words = name.replace("_", " ")
    return words[:1].upper() + words[1:]


def number(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}g}" if abs(value) < 1e5 else f"{value:.2e}"


def _last_depth(result: Result) -> int:
    return int(np.max(result.arrays["depth"]))


def _reading(result: Result, depth: int, digits: int) -> str:
    parts: list[str] = []
    names = short_names(result)
    for name in result.series:
        value = at_depth(result, name).get(depth)
        if value is not None:
            words = f"{names[name]} " if len(result.series) > 1 else ""
            parts.append(f"{words}{number(value, digits)}")
    return ", ".join(parts) or "not defined here"


def _rows(runs: Mapping[str, Result]) -> tuple[tuple[str, ...], ...]:
    first = next(iter(runs.values()))
    head = (*(["run"] if len(runs) > 1 else []), *(first.label(name) for name in first.series))
    rows = [head]
    for run, result in runs.items():
        columns = [[_cell(v) for v in np.ma.asarray(result.arrays[n])] for n in first.series]
        rows += [(*([run] if len(runs) > 1 else []), *row) for row in zip(*columns, strict=True)]
    return tuple(rows)


def _cell(value: Any) -> str:
    if value is np.ma.masked:
        return "-"
    return number(float(value)) if isinstance(value, float | np.floating) else str(value)
