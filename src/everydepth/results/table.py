"""A table: headings, rows of plain values, and notes, for terminals, notebooks and web pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from everydepth.config import brief, checked
from everydepth.errors import SettingError

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table as RichTable

Cell = str | int | float | bool | None
_STEPS = ("", "k", "M", "G", "T", "P")


@checked
@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows hold the measured values, or None; they are formatted for display only.

    units: one per column, or none; "bytes", "count" and "FLOP" are abbreviated (12.3M), others
        appear in the heading.

    >>> from everydepth.results import Table
    >>> table = Table(headings=("depth", "size"), rows=((1, 1_500_000), (2, None)),
    ...               units=("", "bytes"), notes=("depth 2 was not saved",))
    >>> print(table)
    depth   size
        1  1.5MB
        2      -
    depth 2 was not saved
    >>> print(table.markdown())
    | depth | size |
    | ---: | ---: |
    | 1 | 1.5MB |
    | 2 | - |
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    units: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for word in (*self.headings, *self.units, *self.notes):
            if not isinstance(word, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise SettingError(f"{brief(word)} among headings, units and notes; use strings")
        for what, row in [("units", self.units or self.headings), *(("row", r) for r in self.rows)]:
            if len(row) != len(self.headings):
                raise SettingError(
                    f"{what} {brief(row)}, but the table has {len(self.headings)} headings; give "
                    "one for each"
                )

    @property
    def heads(self) -> tuple[str, ...]:
        """The headings with their units."""
        units = self.units or ("",) * len(self.headings)
        return tuple(
            f"{head} ({unit})" if in_heading(unit) else head
            for head, unit in zip(self.headings, units, strict=True)
        )

    @property
    def cells(self) -> tuple[tuple[str, ...], ...]:
        """The rows, formatted."""
        units = self.units or ("",) * len(self.headings)
        if not self.rows or self._is_words(0):  # rows of words may be of different things
            return tuple(tuple(map(shown, row, units)) for row in self.rows)
        columns = zip(*self.rows, strict=True)
        return tuple(zip(*map(_column, columns, units), strict=True))

    @checked
    def column(self, heading: str) -> list[Any]:
        """The values of one column."""
        if heading not in self.headings:
            raise SettingError(f"no column {heading!r}; use one of {', '.join(self.headings)}")
        place = self.headings.index(heading)
        return [row[place] for row in self.rows]

    def _is_words(self, place: int) -> bool:
        return any(isinstance(row[place], str) for row in self.rows)

    def __str__(self) -> str:
        lines = [self.heads, *self.cells]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        words = [self._is_words(place) for place in range(len(widths))]
        text = [
            "  ".join(
                cell.ljust(width) if left else cell.rjust(width)
                for cell, width, left in zip(line, widths, words, strict=True)
            ).rstrip()
            for line in lines
        ]
        return "\n".join([*([self.title] if self.title else []), *text, *self.notes])

    def __rich__(self) -> RichTable:
        from rich.table import Table as RichTable
        from rich.text import Text

        title, caption = Text(self.title), Text("\n".join(self.notes))
        table = RichTable(
            box=None,
            pad_edge=False,
            title=title or None,
            title_justify="left",
            caption=caption or None,
            caption_justify="left",
        )
        for place, head in enumerate(self.heads):
            left = self._is_words(place)
            table.add_column(Text(head), justify="left" if left else "right", no_wrap=not left)
        for row in self.cells:
            table.add_row(*map(Text, row))
        return table

    def _repr_html_(self) -> str:
        def row(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"

        title = f"<p>{escape(self.title)}</p>" if self.title else ""
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        return (
            f"{title}<table><thead>{row(self.heads, 'th')}</thead>"
            f"<tbody>{''.join(row(cells, 'td') for cells in self.cells)}</tbody></table>"
            + (f"<ul>{notes}</ul>" if notes else "")
        )

    def markdown(self) -> str:
        """For a model card or an issue; without title and notes."""
        rule = ["---" if self._is_words(place) else "---:" for place in range(len(self.headings))]
        lines = [self.heads, rule, *self.cells]
        return "\n".join(
            "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in line) + " |"
            for line in lines
        )

    def to_pandas(self) -> pd.DataFrame:
        """One column per heading; None becomes NaN in columns of numbers."""
        try:
            import pandas as pd
        except ImportError as error:
            raise SettingError(
                "to_pandas needs pandas, which is not installed; run `pip install pandas`, or use "
                "table.rows"
            ) from error
        return pd.DataFrame(list(self.rows), columns=list(self.headings)).infer_objects()


_SHORT = ("bytes", "count", "FLOP")


def in_heading(unit: str) -> bool:
    """Whether a unit stands in the heading; the others are part of each value."""
    return bool(unit) and unit not in ("share", *_SHORT)


def shown(value: Cell, unit: str = "") -> str:
    """A value formatted for display: four digits, "-" for None."""
    if value is None or (isinstance(value, float) and value != value):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if unit in _SHORT:
        return f"{_short(value)}{'B' if unit == 'bytes' else ''}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _column(values: Sequence[Cell], unit: str) -> list[str]:
    """The values of a column as they are read: with equal decimals, unless small ones vanish."""
    cells = [shown(value, unit) for value in values]
    floats = [abs(v) for v in values if isinstance(v, float) and math.isfinite(v) and v]
    if not floats or unit in _SHORT or all(v.is_integer() for v in floats):
        return cells
    decimals = 3 - math.floor(math.log10(max(floats)))  # four digits of the largest
    if not 0 <= decimals <= 6 or min(floats) < 10 ** (1 - decimals):
        return cells
    return [
        f"{v:.{decimals}f}" if isinstance(v, float) and math.isfinite(v) else c
        for v, c in zip(values, cells, strict=True)
    ]


def _short(value: float | int) -> str:
    step = 0
    while abs(value) >= 999.5 and step < len(_STEPS) - 1:
        value, step = value / 1000, step + 1
    return f"{value:.3g}{_STEPS[step]}"


def cell(value: Any) -> Cell:
    """A value of a numpy array as a plain one; None if it is masked or NaN."""
    if value is np.ma.masked or value is None:
        return None
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, float) and np.isnan(plain):
        return None
    return plain if isinstance(plain, str | int | float | bool) else str(plain)
