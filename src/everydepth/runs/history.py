"""The logged metrics of a run as Results: one measurement for every number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from everydepth.results import Result, Results, defined, named
from everydepth.results.result import readable

_NO_CURVE = ("step", "epoch", "time", "seconds")
_WORDS = {"lr": "learning rate", "losses": "loss by depth"}

Points = dict[int | None, tuple[list[float], list[float]]]
"""By depth (None for a number without one): steps and values."""


def history(lines: Sequence[Mapping[str, Any]]) -> Results:
    """The lines of metrics.jsonl as curves over steps; numbers logged only once are left out.

    >>> from everydepth.runs.history import history
    >>> lines = [{"step": 1, "loss": 2.0, "valid": {"accuracy": [0.2, 0.5]}},
    ...          {"step": 2, "loss": 1.5, "valid": {"accuracy": [0.3, 0.7]}}]
    >>> found = history(lines)
    >>> list(found), found["loss"].tolist(), found["valid.accuracy"].shape  # steps, depths
    (['loss', 'valid.accuracy'], [2.0, 1.5], (2, 2))
    """
    seen: dict[str, Points] = {}
    for place, line in enumerate(lines):
        step = line.get("step", place)
        for name, depth, value in _numbers_in(line):
            steps, values = seen.setdefault(_WORDS.get(name, name), {}).setdefault(depth, ([], []))
            steps.append(_float(step) if is_number(step) else place)
            values.append(value)
    found = (_measured(name, points) for name, points in seen.items())
    return Results(results=named(*filter(None, found)), kind="training")


def _measured(name: str, points: Points) -> Result | None:
    steps = np.unique([step for steps, _ in points.values() for step in steps])
    if len(steps) < 2:
        return None
    if np.array_equal(steps, steps.astype(np.int64)):
        steps = steps.astype(np.int64)
    depths = sorted(points, key=lambda depth: depth or 0)
    values = np.full((len(steps), len(depths)), np.nan)
    for column, depth in enumerate(depths):
        values[np.searchsorted(steps, points[depth][0]), column] = points[depth][1]
    by_depth = depths != [None]
    arrays = {"step": steps, "value": defined(values if by_depth else values[:, 0])}
    if by_depth:
        arrays["columns"] = np.array([depth or 0 for depth in depths])
    return Result(
        name=name,
        kind="family" if by_depth else "curve",
        axis="step",
        series=("value",),
        arrays=arrays,
        labels={"step": "step", "value": name, "columns": "depth"},
        title=readable(name.replace(".", " ")),
        section="training",
    )


def _numbers_in(
    line: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, int | None, float]]:
    """The numbers in one line: name, depth (if it has one) and value."""
    for key, value in line.items():
        name = f"{prefix}{key}"
        if key in _NO_CURVE or isinstance(value, bool):
            continue
        if is_number(value):
            yield name, None, _float(value)
        elif isinstance(value, list):
            yield from _by_depth(name, dict(enumerate(value, start=1)))  # depths 1..L, from `fit`
        elif isinstance(value, Mapping) and value and all(str(k).isdecimal() for k in value):
            yield from _by_depth(name, {int(k): v for k, v in value.items()})
        elif isinstance(value, Mapping):
            yield from _numbers_in(value, f"{name}.")


def _by_depth(name: str, values: Mapping[int, Any]) -> Iterator[tuple[str, int | None, float]]:
    for depth, value in values.items():
        if is_number(value):
            yield name, depth, _float(value)


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number; bools are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _float(value: int | float) -> float:
    """JSON allows integers too large for a float."""
    try:
        return float(value)
    except OverflowError:
        return float("nan")
