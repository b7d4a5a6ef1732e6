"""Table 1: eight surfaces, end-to-end against training at every depth, from the same start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, over_seeds, published
from everydepth_papers.evidence.rows import fits_surfaces, holds_in, holds_on_average

PUBLISHED = published(__file__)
OBJECTIVES = ("end_to_end", "lpa", "lpa_annealed", "aligned")
SURFACES = tuple(name for name in PUBLISHED if name != "source")


def cell(settings: Cell, seed: int, folder: Path) -> dict[str, Any]:
    """All surfaces and objectives of one seed, trained at once: 32 networks."""
    from everydepth.objectives import aligned, end_to_end, lpa
    from everydepth_papers.evidence.surfaces import train_surfaces

    objectives = {
        "end_to_end": end_to_end(),
        "lpa": lpa(),
        "lpa_annealed": lpa().annealed(to=0.0, by=0.8),
        "aligned": aligned(),
    }
    return train_surfaces(SURFACES, objectives, seed=seed, folder=folder, **settings)


def trajectories(results: Sequence[Finished], surface: str, objective: str) -> np.ndarray:
    """Test MSE, one row per seed, one column per depth 0..L."""
    return np.array([r["networks"][surface][objective]["mse"] for r in results])


def last(results: Sequence[Finished], surface: str, objective: str) -> np.ndarray:
    """One number per seed: the error of the last depth."""
    return trajectories(results, surface, objective)[:, -1]


def relative(results: Sequence[Finished], objective: str) -> np.ndarray:
    """For each seed, the geometric mean over surfaces of the error relative to end-to-end."""
    logs = [np.log(last(results, s, objective) / last(results, s, "end_to_end")) for s in SURFACES]
    return np.exp(np.mean(logs, axis=0))


def printed_ratio() -> float:
    both = (PUBLISHED[s] for s in SURFACES)
    return float(np.exp(np.mean([np.log(v["lpa"] / v["end_to_end"]) for v in both])))


FITS = fits_surfaces(
    lambda r, surface: 1 - _last(r, surface, "end_to_end") / _plane(r, surface),
)


def _plane(result: Finished, surface: str) -> float:
    from everydepth_papers.evidence.surfaces import plane_error

    return plane_error(surface, result.cell["points"], result.seed)


def _last(result: Finished, surface: str, objective: str, what: str = "mse") -> float:
    return result["networks"][surface][objective][what][-1]


def _falls(result: Finished, surface: str, objective: str) -> bool:
    """Whether the error falls from every depth 1..L to the next."""
    return bool((np.diff(result["networks"][surface][objective]["mse"][1:]) <= 0).all())


def statements(results: Sequence[Finished]) -> list[Row]:
    """LPA against end-to-end, surface by surface; and how the error goes from block to block."""
    found: list[Row] = []
    for surface in SURFACES:
        cases = [(result, surface) for result in results]
        known = all("mae" in r["networks"][surface]["lpa"] for r in results)
        for what in ("mse", "mae") if known else ("mse",):
            found.append(
                holds_on_average(
                    f"Table 1: {surface.replace('_', ' ')}, LPA's {what.upper()} is the lower "
                    "(log10 of LPA's over end-to-end's)",
                    "on all eight surfaces",
                    [
                        np.log10(_last(r, s, "lpa", what) / _last(r, s, "end_to_end", what))
                        for r, s in cases
                    ],
                    [FITS.checked(cases)],
                    high=0.0,
                )
            )
    every = [(result, surface) for result in results for surface in SURFACES]
    for objective, words, test in (
        ("lpa", "LPA's error falls at every block", _falls),
        (
            "end_to_end",
            "end-to-end's error rises at some block",
            lambda r, s, objective: not _falls(r, s, objective),
        ),
    ):
        found.append(
            holds_in(
                f"Fig. 2, 3: {words}",
                "LPA falls with every layer, end-to-end fluctuates",
                every,
                lambda r, s, test=test, objective=objective: test(r, s, objective),
                unit="networks",
                premises=[FITS],
            )
        )
    return found


def few_steps(results: Sequence[Finished]) -> list[Row]:
    """The same comparison where each epoch is one step on all points: far from converged."""
    found: list[Row] = []
    rates = dict.fromkeys(r.cell["lr"] for r in results)
    for lr in rates:
        mine = [r for r in results if r.cell["lr"] == lr]
        what = f"{mine[0].cell['epochs']} full-batch steps, rate {lr:g}"
        logs = [np.log(last(mine, s, "end_to_end")) for s in SURFACES]
        mean = np.exp(np.mean(logs, axis=0))
        printed = [PUBLISHED[s]["end_to_end"] for s in SURFACES]
        shown = float(f"{np.exp(np.mean(np.log(printed))):.3g}")
        found.append(over_seeds(f"{what}: final MSE, end_to_end, geometric mean", shown, mean))
        for name in OBJECTIVES[1:]:
            shown = round(printed_ratio(), 3) if name == "lpa" else None
            quantity = f"{what}: final MSE / end-to-end, {name}"
            found.append(over_seeds(quantity, shown, relative(mine, name)))
    return found


def converged(results: Sequence[Finished]) -> list[Finished]:
    """The results of training in batches: what the table is about."""
    return [r for r in results if r.cell["batch_size"] < r.cell["points"]]


def rows(everything: Sequence[Finished]) -> list[Row]:
    results = converged(everything)
    found = [
        over_seeds(
            f"final MSE / end-to-end, {name}, geometric mean of 8 surfaces",
            round(printed_ratio(), 3) if name == "lpa" else None,
            relative(results, name),
        )
        for name in OBJECTIVES[1:]
    ]
    printed = [PUBLISHED[surface]["end_to_end"] for surface in SURFACES]
    mean = np.exp(np.mean([np.log(last(results, s, "end_to_end")) for s in SURFACES], axis=0))
    shown = float(f"{np.exp(np.mean(np.log(printed))):.3g}")
    found.append(over_seeds("final MSE, end_to_end, geometric mean of 8 surfaces", shown, mean))
    found += few_steps([r for r in everything if r not in results])
    for surface in SURFACES:
        means = {name: float(np.mean(last(results, surface, name))) for name in OBJECTIVES}
        best = min(means, key=lambda name: means[name])
        for name in OBJECTIVES:
            note = "smallest mean" if name == best else ""
            value = PUBLISHED[surface].get(name)
            quantity = f"MSE, {surface.replace('_', ' ')}, {name}"
            found.append(over_seeds(quantity, value, last(results, surface, name), note))
            absolute = [r["networks"][surface][name].get("mae") for r in results]
            if None not in absolute:  # results from before it was kept have none
                printed_mae = PUBLISHED[surface]["mae"].get(name)
                quantity = f"MAE, {surface.replace('_', ' ')}, {name}"
                values = [float(values[-1]) for values in absolute]
                found.append(over_seeds(quantity, printed_mae, values))
    for name in OBJECTIVES:
        logs = [np.log(trajectories(results, s, name)[:, 3]) for s in SURFACES]
        half = np.exp(np.mean(logs, axis=0))
        found.append(over_seeds(f"MSE at half depth, {name}, geometric mean", None, half))
    return [*statements(results), *found]


def figure(everything: Sequence[Finished]) -> Any:
    """Error against depth, one panel per surface; the band is the smallest and largest seed."""
    from matplotlib.figure import Figure

    results = converged(everything)
    drawn = Figure(figsize=(13, 6), layout="constrained")
    axes = drawn.subplots(2, 4).flat
    for place, surface in zip(axes, SURFACES, strict=True):
        for name in OBJECTIVES:
            mse = trajectories(results, surface, name)
            depths = np.arange(mse.shape[1])
            mean = np.exp(np.log(mse).mean(0))
            place.semilogy(depths, mean, marker="o", markersize=3, label=name.replace("_", " "))
            place.fill_between(depths, mse.min(0), mse.max(0), alpha=0.15)
        place.set_title(surface.replace("_", " "), fontsize=9)
        place.set_xlabel("depth")
        place.set_ylabel("test MSE")
    drawn.axes[0].legend(fontsize=8)
    return drawn


HOW = {"batch_size": 100, "lr": 1e-3}


def few(lr: float) -> Cell:
    return {"epochs": 300, "points": 2000, "batch_size": 2000, "lr": lr, "every": 100}


FULL = Preset(
    cells=({"epochs": 300, "points": 10_000, **HOW}, few(1e-3), few(1e-2)),
    seeds=5,
    cost="25 min, 1 core",
    memory_gib=0.5,
)
RECIPE = Recipe(
    name="progressive_table1",
    title="Surfaces: end-to-end against training at every depth",
    paper="progressive",
    item="Table 1 and Figures 2 and 3",
    about=(
        "6 residual blocks of width 30, ReLU, 10,000 training and 10,000 test points, 300 epochs, "
        "as printed. The paper's formulas are lost, so the surfaces are ours, made after its "
        "descriptions (everydepth.data.SURFACES): compare ratios, not errors. Ours, too, because "
        "the paper says only 'standard': Adam, learning rate 0.001 falling to 0 along a cosine, "
        "batches of 100, the same for every objective. Annealed LPA lets the weights of early "
        "depths fall to 0 by 80 % of the training. Networks of one surface and seed start alike. "
        "The small preset is the full one. The paper's errors are those of networks far from "
        "converged; two further settings, one step an epoch on all of 2,000 points, look there."
    ),
    presets={
        "smoke": Preset(
            cells=(
                {"epochs": 2, "points": 300, "every": 1, **HOW},
                {**few(1e-2), "epochs": 2, "points": 300, "batch_size": 300},
            ),
            seeds=2,
            cost="2 s",
        ),
        "small": FULL,
        "paper": FULL,
    },
    cell=cell,
    rows=rows,
    figure=figure,
)
