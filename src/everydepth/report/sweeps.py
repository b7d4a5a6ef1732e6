"""The panels of sweeps over depth and width, and of scaling laws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from everydepth.report.growth import table_of
from everydepth.report.panels import Panel, number, panel, readable
from everydepth.results.figures.chart import Axis, Chart, Dots, Line

Runs = Mapping[str, Any]


def _floats(values: Any) -> np.ndarray:
    return np.array(values, dtype=float)


MEASURES = ("test_loss", "train_loss", "loss", "accuracy", "signal")
ACROSS = ("layers", "depth", "width", "parameters")


@panel("sweep", section="growth")
def sweep(runs: Runs) -> Panel:
    """Whatever was measured against depth and width: means over seeds, bands of one deviation."""
    charts: list[Chart] = []
    notes: list[str] = []
    for run, rows in runs.items():
        title = run if len(runs) > 1 else ""
        axes = [n for n in ACROSS[:3] if n in rows[0] and len({r[n] for r in rows}) > 1]
        for y in (name for name in MEASURES if name in rows[0]):
            for x in axes:
                others = [name for name in axes if name != x]
                charts.append(_curves(rows, y, x, others[0] if others else None, title))
            if y == "signal" and axes:
                others = [name for name in axes if name != axes[0]]
                by = others[0] if others else None
                charts.append(_curves(rows, y, axes[0], by, title, relative=True))
        notes.append(f"{run}: {len(rows)} trainings")
    return Panel(
        title="Depth and width",
        about="One network a point: means over seeds, bands of one standard deviation.",
        charts=tuple(charts),
        notes=tuple(notes),
    )


def _curves(
    rows: Sequence[Mapping[str, Any]],
    y: str,
    x: str,
    by: str | None,
    title: str,
    *,
    relative: bool = False,
) -> Chart:
    marks: list[Line] = []
    for i, group in enumerate(sorted({row[by] for row in rows}) if by else [None]):
        mine = [row for row in rows if by is None or row[by] == group]
        at = sorted({row[x] for row in mine})
        each = [_floats([row[y] for row in mine if row[x] == place]) for place in at]
        mean = np.array([values.mean() for values in each])
        std = np.array([values.std() for values in each])
        scale = mean[0] if relative else 1.0
        marks.append(
            Line(
                x=np.array(at),
                y=mean / scale,
                low=(mean - std) / scale,
                high=(mean + std) / scale,
                name="" if by is None else f"{by} {group}",
                colour=i % 7,
                dash=i % 4,
            )
        )
    label = readable(y).lower() + (f", of that at the smallest {x}" if relative else "")
    return Chart(title=title, x=Axis(label=x), y=Axis(label=label), marks=tuple(marks))


@panel("scaling", section="growth")
def scaling(runs: Runs) -> Panel:
    """The points, what the fitted law says of them, and the plan."""
    charts: list[Chart] = []
    rows: dict[str, list[tuple[str, ...]]] = {}
    notes: list[str] = []
    for run, found in runs.items():
        fit, plan = found["fit"], found["plan"]
        if found.get("points"):
            charts.append(_fitted(found["points"], fit["values"], run if len(runs) > 1 else ""))
        mine: list[tuple[str, ...]] = []
        for name, value in fit["values"].items():
            low, high = (fit["intervals"] or {}).get(name, (math.nan, math.nan))
            spread = "" if math.isnan(low) else f"{number(low)} to {number(high)}"
            mine.append((f"law: {name}", number(value), spread))
        for name in ("parameters", "tokens", "flops", "depth", "width", "loss"):
            mine.append((f"plan: {name}", number(float(plan[name])), ""))
        who, size, depth, width, *projected = plan["levine"]
        trained = "not trained" if depth is None else f"trained {depth} x {width}"
        shape = f"{projected[0]} x {projected[1]}"
        mine.append((f"nearest in Levine's table: {who}", trained, shape))
        who, size, tokens = plan["trained"]
        mine.append((f"nearest trained: {who}", f"{size:.3g} parameters", f"{tokens:.3g} tokens"))
        rows[run] = mine
        if not fit["converged"]:
            notes.append(f"{run}: the fit did not settle; give more points that differ in size")
    return Panel(
        title="Scaling law and plan",
        about="Depth, width and data for a budget, by a law fitted to points.",
        charts=tuple(charts),
        table=table_of(("what", "value", "95 % interval, or projected"), rows),
        notes=tuple(notes),
    )


def _fitted(points: Mapping[str, Any], v: Mapping[str, float], title: str) -> Chart:
    n, d, loss = (_floats(points[name]) for name in ("parameters", "tokens", "loss"))
    said = v["E"] + v["A"] * n ** -v["alpha"] + v["B"] * d ** -v["beta"]
    line = np.array([min(loss.min(), said.min()), max(loss.max(), said.max())])
    return Chart(
        title=title,
        x=Axis(label="loss that the law says"),
        y=Axis(label="loss measured"),
        marks=(
            Dots(x=said, y=loss, name="points"),
            Line(x=line, y=line, name="equal", colour=1, dash=1, markers=False),
        ),
    )
