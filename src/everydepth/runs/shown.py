"""The rows of a sweep as results: means over seeds against every setting that was varied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from everydepth.results import Result, Results, named, rows
from everydepth.results.result import readable
from everydepth.results.results import class_of

Row = Mapping[str, Any]


def convert(name: str, content: Sequence[Row], folder: Path) -> Results:
    """What results.json holds of a sweep: its rows. Settings are what differs between them."""
    varied = {key: value for key, value in content[0].items() if _differs(content, key)}
    measured = measurements(content, varied if "seed" in varied else {**varied, "seed": None})
    return class_of(name)(results=measured, kind=name)


def measurements(content: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, Result]:
    """Every number of a row against every number that was varied, and all rows to read."""
    first = content[0]
    # Cells need not be alike: what some of them lack has no curve.
    known = [name for name in first if all(_is_number(row.get(name)) for row in content)]
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
        about="The settings and the outcome of every cell.",
        section="growth",
    )
    return named(*found, cells)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _differs(content: Sequence[Row], name: str) -> bool:
    return len({str(row.get(name)) for row in content}) > 1


def _curves(content: Sequence[Row], y: str, x: str, by: str | None) -> Result:
    series: dict[str, np.ndarray] = {}
    for group in sorted({row[by] for row in content}) if by else [None]:
        mine = [row for row in content if by is None or row[by] == group]
        at = sorted({row[x] for row in mine})
        each = [np.array([row[y] for row in mine if row[x] == p], dtype=float) for p in at]
        mean, std = (np.array([f(values) for values in each]) for f in (np.mean, np.std))
        name = "mean" if by is None else f"{by} {group}"
        series |= {name: mean, f"{name}_low": mean - std, f"{name}_high": mean + std}
        series[f"{name}_{x}"] = np.array(at)
    names = [key for key in series if f"{key}_{x}" in series]
    return Result(
        name=f"{y}_by_{x}",
        kind="curve",
        axis=x,
        series=tuple(names),
        arrays=series,
        labels={x: x, **{key: f"{key}: {y.replace('_', ' ')}" for key in names}},
        title=f"{readable(y)} against {x}",
        about="One network a point: means over seeds, bands of one standard deviation.",
        section="growth",
    )
