"""Cards: a measurement as it appears on the page, whatever verb made it.

A card depends on the measurement alone: its kind determines how it is drawn, its title and
description are shown as they are, and its unit and direction determine how values are phrased.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from everydepth.errors import FOREIGN, SettingError
from everydepth.reports.words import by_depth
from everydepth.results import Table
from everydepth.results.figures.chart import Chart
from everydepth.results.figures.kinds import Runs, charts, number_columns
from everydepth.results.figures.web import description
from everydepth.results.layout import cells, table_of
from everydepth.results.result import readable

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
}
"""Headings of the known sections, in page order. Other sections follow under their own names, and
measurements without a section come last."""
MORE = "more"


@dataclass(frozen=True, kw_only=True)
class Card:
    """One measurement of all `runs` that have it. readings: by run, one text per depth 0..L."""

    title: str
    about: str = ""
    charts: tuple[Chart, ...] = ()
    readings: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    table: Table | None = None
    notes: tuple[str, ...] = ()
    section: str = MORE
    runs: tuple[str, ...] = ()


def card(runs: Runs) -> Card:
    """The card of a measurement; if it is malformed, a card that says so."""
    first = next(iter(runs.values()))
    words = Card(
        title=first.title, about=first.about, section=first.section or MORE, runs=tuple(runs)
    )
    try:
        found = _card(runs, replace(words, notes=_notes(runs)))
        description(found.charts)  # so that charts that cannot be drawn are noticed here
        return found
    except (SettingError, *FOREIGN) as error:
        # Files may be untrusted: still show the other cards.
        why = f"{first.name} could not be drawn ({type(error).__name__}: {error})"
        return replace(words, notes=(why,))


def heading(section: str) -> str:
    return "More" if section == MORE else SECTIONS.get(section, readable(section))


def in_order(cards: Sequence[Card]) -> list[str]:
    """The sections of the cards, in the order of the page."""
    there = dict.fromkeys(card.section for card in cards)
    known = [section for section in SECTIONS if section in there]
    own = [section for section in there if section not in SECTIONS and section != MORE]
    return [*known, *own, *([MORE] if MORE in there else [])]


def _card(runs: Runs, card: Card) -> Card:
    present = {run: result for run, result in runs.items() if not result.is_gap}
    if not present:
        return card
    first = next(iter(present.values()))
    if first.kind == "scalar":
        return replace(card, table=_numbers(present))
    if first.kind == "rows" or (first.kind == "table" and not number_columns(first)):
        return replace(card, table=_rows(present))
    readings = {run: texts for run, result in present.items() if (texts := by_depth(result))}
    return replace(card, charts=charts(present, ""), readings=readings)


def _numbers(runs: Runs) -> Table:
    """Single numbers as a table with one column per run."""
    first = next(iter(runs.values()))
    return Table(
        headings=("", *runs),
        rows=tuple(
            (
                first.label(name),
                *(cells(np.ma.atleast_1d(r.arrays[name]))[0] for r in runs.values()),
            )
            for name in first.series
        ),
    )


def _rows(runs: Runs) -> Table:
    """The tables of all runs, stacked; with several runs, the first column is the run."""
    tables = {run: table_of(result) for run, result in runs.items()}
    first = next(iter(tables.values()))
    if len(tables) == 1:
        return replace(first, title="", notes=())
    return Table(
        headings=("run", *first.headings),
        rows=tuple((run, *row) for run, found in tables.items() for row in found.rows),
        units=("", *first.units) if first.units else (),
    )


def _notes(runs: Runs) -> tuple[str, ...]:
    """The notes, prefixed with the run unless all runs have the same note."""
    notes = {run: result.note for run, result in runs.items() if result.note}
    if len(notes) == len(runs) and len(set(notes.values())) == 1:
        return (next(iter(notes.values())),)
    return tuple(f"{run}: {note}" for run, note in notes.items())
