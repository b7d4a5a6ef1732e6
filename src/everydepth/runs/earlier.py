"""Sweeps as they were written before all results were saved alike: the rows of their cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from everydepth.results import Result, Results, named, rows
from everydepth.results.result import readable
from everydepth.results.results import class_of

MEASURES = ("test_loss", "train_loss", "loss", "accuracy", "signal")
ACROSS = ("layers", "depth", "width")


def convert(name: str, content: Sequence[Mapping[str, Any]], folder: Path) -> Results:
    """Means over seeds against depth and width, and every cell as a row."""
    first = content[0]
    axes = [n for n in ACROSS if n in first and len({row[n] for row in content}) > 1]
    found: list[Result] = []
    for y in (measure for measure in MEASURES if measure in first):
        for x in axes:
            others = [axis for axis in axes if axis != x]
            by = others[0] if others else None
            found.append(_curves(content, y, x, by))
            if y == "signal" and x == axes[0]:
                found.append(_curves(content, y, x, by, relative=True))
    plain = [key for key, value in first.items() if isinstance(value, str | int | float)]
    cells = rows(
        "cells",
        {key: [row.get(key) for row in content] for key in plain},
        title="Cells",
        about="The settings and the outcome of every cell.",
        section="growth",
    )
    about = {"cells": len(content)}
    return class_of("sweep")(results=named(*found, cells), about=about, kind="sweep")


def _curves(
    content: Sequence[Mapping[str, Any]], y: str, x: str, by: str | None, *, relative: bool = False
) -> Result:
    series: dict[str, np.ndarray] = {}
    for group in sorted({row[by] for row in content}) if by else [None]:
        mine = [row for row in content if by is None or row[by] == group]
        at = sorted({row[x] for row in mine})
        each = [np.array([row[y] for row in mine if row[x] == p], dtype=float) for p in at]
        mean, std = (np.array([f(values) for values in each]) for f in (np.mean, np.std))
        if relative:
            mean, std = mean / mean[0], std / mean[0]
        name = "mean" if by is None else f"{by} {group}"
        series |= {name: mean, f"{name}_low": mean - std, f"{name}_high": mean + std}
        series[f"{name}_{x}"] = np.array(at)
    names = [key for key in series if f"{key}_{x}" in series]
    return Result(
        name=f"{y}_by_{x}" + ("_relative" if relative else ""),
        kind="curve",
        axis=x,
        series=tuple(names),
        arrays=series,
        labels={x: x, **{key: f"{key}: {y.replace('_', ' ')}" for key in names}},
        title=f"{readable(y)} against {x}" + (f", of that at the smallest {x}" if relative else ""),
        about="One network a point: means over seeds, bands of one standard deviation.",
        section="growth",
    )
