"""What a recipe came to, from its plain JSON, as Results that a report can show."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everydepth.results import Results, named, rows


def convert(name: str, outcome: Mapping[str, Any], folder: Path) -> Results:
    """One line a quantity: published beside measured."""
    lines = outcome["rows"]
    table = rows(
        name,
        {
            "quantity": [row["quantity"] for row in lines],
            "published": [_value(row["published"]) for row in lines],
            "measured": [_value(row["measured"]) for row in lines],
            "spread": [
                "" if row["low"] is None else f"{_value(row['low'])} … {_value(row['high'])}"
                for row in lines
            ],
            "note": [row["note"] or "" for row in lines],
        },
        title=outcome["title"],
        about="What the paper prints and what was measured here; the spread is over seeds.",
        note=f"{outcome['source']}, preset {outcome['preset']}, {outcome['seeds']} seed(s), "
        f"{outcome['seconds']:.0f} s: {outcome['command']}. {outcome['about']}",
    )
    return Results(results=named(table), kind=name)


def _value(value: float | int | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{float(value):.4g}"
