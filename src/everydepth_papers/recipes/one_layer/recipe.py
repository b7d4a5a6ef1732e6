"""Error of one transformer layer against its size, constructed and trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, over_seeds, published
from everydepth_papers.evidence.rows import holds_in

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PUBLISHED = published(__file__)
LIMIT = "error over the precision asked for, at most"
MIXING = ("neighbors", "prefix", "contrast")
NAMES = ("wave", "turn", "places", "contrast", "soft_lookup", "neighbors", "prefix", "sort")


def cell(settings: Cell, seed: int, folder: Path) -> Mapping[str, Any]:
    from everydepth_papers.constructions import MAPS, construct, fit_single_layer

    map_ = MAPS[settings["map"]]
    if settings["how"] == "constructed":
        if seed > 0:
            return {}  # nothing in a construction is random
        found = construct(map_, precision=settings["precision"], points=settings["points"])
        more = {"side": found.side, "directions": found.directions, "nonzero": found.nonzero}
    else:
        found = fit_single_layer(
            map_,
            width=settings["width"],
            heads=settings["heads"],
            steps=settings["steps"],
            points=settings["points"],
            seed=seed,
            progress=False,
        )
        more = {"mse": found.mse}
    return {
        "error": found.error,
        "hidden": found.hidden,
        "parameters": found.parameters,
        "points": found.points,
        **more,
    }


def rows(results: Sequence[Finished]) -> Sequence[Row]:
    built, trained = _split(results)
    table = [
        holds_in(
            "the theorem: a constructed layer is within the precision asked for",
            "to any precision",
            built,
            lambda r: r["error"] <= r.cell["precision"],
            "largest error at points that were not used",
            unit="layers",
        ),
        holds_in(
            "the theorem: trained, the widest layer is better than the narrowest",
            "any precision at sufficient width",
            _ends(trained),
            lambda narrow, wide: wide["error"] < narrow["error"],
            "largest error; same map, heads and seed",
            unit="pairs",
        ),
    ]
    for result in built:
        asked = result.cell["precision"]
        table.append(
            Row(
                f"{result.cell['map']}: error / precision {asked:g}, constructed",
                PUBLISHED[LIMIT],
                round(result["error"] / asked, 3),
                note=f"error {result['error']:.3g} at {result['points']:,} points not used; "
                f"{result['hidden']:,} units, {result['parameters']:,} parameters",
            )
        )
    for name in _names(trained):
        mine = [r for r in trained if r.cell["map"] == name]
        for width, heads in sorted({(r.cell["width"], r.cell["heads"]) for r in mine}):
            found = [r for r in mine if (r.cell["width"], r.cell["heads"]) == (width, heads)]
            row = over_seeds(
                f"{name}: sup error, trained, {width} units, {heads} heads",
                None,
                [r["error"] for r in found],
                f"{found[0]['parameters']:,} parameters, {found[0].cell['steps']} steps",
            )
            table.append(row)
    for what, found in (("constructed", built), ("trained", trained)):
        for name in _names(found):
            slope = _slope([r for r in found if r.cell["map"] == name])
            if slope is not None:
                table.append(
                    Row(
                        f"{name}: log error per log parameters, {what}",
                        None,
                        round(slope, 2),
                        note="least squares over the sizes above",
                    )
                )
    return table


def _split(results: Sequence[Finished]) -> tuple[list[Finished], list[Finished]]:
    # A construction does not depend on a seed.
    built = [r for r in results if r.cell["how"] == "constructed" and r.seed == 0]
    return built, [r for r in results if r.cell["how"] == "trained"]


def _ends(trained: Sequence[Finished]) -> list[tuple[Finished, Finished]]:
    """The narrowest and the widest layer of each map, number of heads and seed."""
    found: dict[tuple[Any, ...], list[Finished]] = {}
    for r in sorted(trained, key=lambda r: r.cell["width"]):
        found.setdefault((r.cell["map"], r.cell["heads"], r.seed), []).append(r)
    return [(group[0], group[-1]) for group in found.values() if len(group) > 1]


def _names(results: Sequence[Finished]) -> list[str]:
    return list(dict.fromkeys(r.cell["map"] for r in results))


def _slope(results: Sequence[Finished]) -> float | None:
    points = {(r["parameters"], r["error"]) for r in results}
    if len({p for p, _ in points}) < 3:
        return None
    x, y = np.log(np.array(sorted(points))).T
    return float(np.polyfit(x, y, 1)[0])


def figure(results: Sequence[Finished]) -> Figure | None:
    """Sup-norm error against parameters, log-log."""
    from matplotlib.figure import Figure

    built, trained = _split(results)
    drawn = Figure(figsize=(10, 4.2), layout="constrained")
    axes = drawn.subplots(1, 2, sharey=True)
    for axis, what, found in zip(axes, ("constructed", "trained"), (built, trained), strict=True):
        for name in _names(found):
            mine = [r for r in found if r.cell["map"] == name]
            sizes = sorted({r["parameters"] for r in mine})
            errors = [np.mean([r["error"] for r in mine if r["parameters"] == s]) for s in sizes]
            axis.loglog(sizes, errors, "o-", label=name, markersize=4)
        axis.set(xlabel="parameters", title=what)
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("largest error on points not used")
    axes[0].legend(fontsize=8)
    return drawn


def _cells(
    maps: Sequence[str],
    precisions: Sequence[float],
    widths: Sequence[int],
    heads: Sequence[int],
    *,
    trained: Sequence[str],
    steps: int,
    points: int,
) -> list[Cell]:
    built = [
        {"how": "constructed", "map": m, "precision": p, "points": points}
        for m in maps
        for p in precisions
    ]
    return built + [
        {"how": "trained", "map": m, "width": w, "heads": h, "steps": steps, "points": points}
        for m in trained
        for w in widths
        for h in heads
    ]


RECIPE = Recipe(
    name="one_layer",
    title="One transformer layer: error against size",
    paper="one_layer",
    item="the approximation theorem",
    presets={
        "smoke": Preset(
            cells=_cells(
                ("wave", "neighbors"), (0.1,), (16,), (1,), trained=("wave",), steps=20, points=500
            ),
            seeds=1,
            cost="1 s",
        ),
        "small": Preset(
            cells=_cells(
                NAMES,
                (0.2, 0.1, 0.05),
                (16, 64, 256),
                (1, 3),
                trained=MIXING,
                steps=500,
                points=8000,
            ),
            seeds=3,
            cost="2 min, 1 core",
        ),
        "paper": Preset(
            cells=_cells(
                NAMES,
                (0.4, 0.2, 0.1, 0.05, 0.025),
                (16, 64, 256, 1024, 4096),
                (1, 2, 4),
                trained=NAMES,
                steps=20_000,
                points=20_000,
            ),
            seeds=5,
            cost="about 20 h, 1 core; the paper prints no experiment, so the sizes are ours",
        ),
    },
    cell=cell,
    rows=rows,
    figure=figure,
    about="The maps, sizes and training are ours: the paper states a theorem and prints no "
    "figure. A construction is verified through the module's own forward at points it was not "
    "built from.",
)
