"""The panel of a recipe: published figures beside measured ones, from its plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everydepth.report.panels import Panel, number, panel


@panel("reproduction", section="more")
def reproduction(runs: Mapping[str, Any]) -> Panel:
    """One line a quantity."""
    several = len(runs) > 1
    head = (*(["run"] if several else []), "quantity", "published", "measured", "spread", "note")
    rows: list[tuple[str, ...]] = [head]
    notes: list[str] = []
    for run, found in runs.items():
        notes.append(
            f"{found['source']}, preset {found['preset']}, {found['seeds']} seed(s), "
            f"{found['seconds']:.0f} s: {found['command']}. {found['about']}"
        )
        for row in found["rows"]:
            spread = "" if row["low"] is None else f"{_value(row['low'])} … {_value(row['high'])}"
            cells = (_value(row["published"]), _value(row["measured"]), spread, row["note"])
            rows.append((*([run] if several else []), row["quantity"], *cells))
    titles = list(dict.fromkeys(found["title"] for found in runs.values()))
    return Panel(
        title="; ".join(titles),
        about="What the paper prints and what was measured here; the spread is over seeds.",
        table=tuple(rows),
        notes=tuple(notes),
    )


def _value(value: float | int | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else number(float(value))
