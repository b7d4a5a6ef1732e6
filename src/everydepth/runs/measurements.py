"""The rows of a sweep as measurements: means over seeds against every setting that varies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from everydepth.results import Result, lines, named, rows
from everydepth.results.result import readable
from everydepth.runs.history import is_number

Row = Mapping[str, Any]


def measurements(content: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, Result]:
    """A curve for every measured number over every number that varies, and a table of all rows."""
    first = content[0]
    # Rows may have different columns: one that some of them lack has no curve.
    known = [name for name in first if all(is_number(row.get(name)) for row in content)]
    across = [n for n in known if n in settings and n != "seed" and _differs(content, n)]
    measured = [name for name in known if name not in settings]
    found: list[Result] = []
    for y in measured:
        for x in across:
            by = next((other for other in across if other != x), None)
            found.append(_curves(content, y, x, by))
    plain = [key for key, value in first.items() if isinstance(value, str | int | float)]
    cells = rows(
        "cells",
        {key: [row.get(key) for row in content] for key in plain},
        title="Cells",
        about="Settings and outcome of every cell.",
        section="growth",
    )
    return named(*found, cells)


def _differs(content: Sequence[Row], name: str) -> bool:
    return len({str(row.get(name)) for row in content}) > 1


def _curves(content: Sequence[Row], y: str, x: str, by: str | None) -> Result:
    """Means and deviations of y against x, a line for each value of `by`."""
    groups: dict[Any, dict[Any, list[float]]] = {}
    for row in content:
        groups.setdefault(row[by] if by else None, {}).setdefault(row[x], []).append(row[y])
    series: dict[str, dict[str, Any]] = {}
    for group, values in sorted(groups.items()):
        each = [np.array(values[at], float) for at in sorted(values)]
        mean = np.array([v.mean() for v in each])
        std = np.array([v.std(ddof=1) if len(v) > 1 else 0.0 for v in each])
        band = {"x": sorted(values), "y": mean, "low": mean - std, "high": mean + std}
        series["mean" if by is None else f"{by} {group}"] = band
    return lines(
        f"{y}_by_{x}",
        series,
        axis=x,
        of=y.replace("_", " "),
        labels={x: x},
        title=f"{readable(y)} against {x}",
        about="Means over seeds, with bands of one standard deviation.",
        section="growth",
    )
