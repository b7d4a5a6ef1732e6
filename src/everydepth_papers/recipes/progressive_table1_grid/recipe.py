"""Table 1 under every reading: optimizers, rates, block forms, and a control for the step size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, over_seeds, published
from everydepth_papers.evidence.rows import fits_surfaces, holds_in, where

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PUBLISHED = published(__file__)
OBJECTIVES = ("end_to_end", "lpa", "faster")
FASTER = 1.5
"""LPA's weights add up to 1.5 with six blocks: is its gain that of a larger step?"""
# name -> (optimizer, schedule, three rates)
OPTIMIZERS = {
    "SGD": ("sgd", "constant", (0.01, 0.03, 0.1)),
    "SGD with momentum": ("momentum", "constant", (0.003, 0.01, 0.03)),
    "Adam": ("adam", "constant", (3e-4, 1e-3, 3e-3)),
    "Adam, cosine": ("adam", "cosine", (3e-4, 1e-3, 3e-3)),
}
FORMS: dict[str, Cell] = {
    "two maps": {},
    "x + ReLU(Wx + b)": {"one_map": True},
    "stream of width 2": {"hidden_size": 2, "intermediate_size": 30},
}
FITS = fits_surfaces(lambda case: case["fits"])
DRAWN = "damped_concentric_ripples"


def cell(settings: Cell, seed: int, folder: Path) -> dict[str, Any]:
    """All surfaces by all three, trained at once: 24 networks."""
    from everydepth.data import SURFACES
    from everydepth.objectives import end_to_end, lpa
    from everydepth_papers.evidence.surfaces import train_surfaces

    kept = {k: v for k, v in settings.items() if k not in ("form", "by")}
    objectives = {"end_to_end": end_to_end(), "lpa": lpa(), "faster": end_to_end()}
    found = train_surfaces(
        list(SURFACES),
        objectives,
        seed=seed,
        factors={"faster": FASTER},
        folder=folder,
        **FORMS[settings["form"]],
        **kept,
    )
    networks = {
        surface: {name: _kept(one) for name, one in by.items()}
        for surface, by in found["networks"].items()
    }
    if "drawn" in found:
        layers = {name: one["layers"] for name, one in found["networks"][DRAWN].items()}
        shown = {"drawn": found["drawn"], "layers": layers, "epochs": found["epochs"]}
        return {"networks": networks, **shown}
    return {"networks": networks}


def _kept(network: dict[str, Any]) -> dict[str, Any]:
    """The values that rows need; all of them would be a megabyte."""
    names = ("mse", "mae", "grid_mse", "grid_mae")
    last = {name: network[name][-1] for name in names}
    return {**last, "rises": round(_rises(network["layers"]), 4)}


def last(result: Finished, objective: str, what: str) -> np.ndarray:
    """The error of the last depth on every surface; infinite where training diverged."""
    found = [networks[objective][what] for networks in result["networks"].values()]
    return np.array([np.inf if value is None else value for value in found])


def ratios(result: Finished, objective: str, over: str, what: str) -> np.ndarray:
    """One number per surface; a diverged network has lost, and two are a draw."""
    a, b = last(result, objective, what), last(result, over, what)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(np.isinf(a) & np.isinf(b), 1.0, np.where(np.isinf(b), 0.0, a / b))


def middle(values: np.ndarray) -> float:
    """The median over surfaces, which one diverged network hardly affects."""
    return float(np.median(values))


def rows(results: Sequence[Finished]) -> list[Row]:
    found: list[Row] = []
    for form in dict.fromkeys(r.cell["form"] for r in results):
        for by in dict.fromkeys(r.cell["by"] for r in results):
            mine = where(results, form=form, by=by)
            for lr in dict.fromkeys(r.cell["lr"] for r in mine):
                found += _setting(where(mine, lr=lr), f"{form}, {by} {lr:g}")
    return [*_overall(results), *_rising(results), *found]


def cases(results: Sequence[Finished], over: str) -> list[dict[str, float]]:
    """Every surface of every result: the ratio of LPA's error, and what end-to-end learned."""
    return [
        {"ratio": float(ratio), "fits": float(fits)}
        for r in results
        for ratio, fits in zip(ratios(r, "lpa", over, "mse"), fitted(r), strict=True)
    ]


def fitted(result: Finished) -> np.ndarray:
    """The share of a plane's error that end-to-end takes off; NaN where it diverged."""
    error = last(result, "end_to_end", "mse")
    return 1 - np.where(np.isinf(error), np.nan, error) / planes(result)


def diverged(results: Sequence[Finished]) -> str:
    """`diverged: lpa 6`: networks of each objective; empty if none did."""
    wild = {o: sum(int(np.isinf(last(r, o, "mse")).sum()) for r in results) for o in OBJECTIVES}
    found = ", ".join(f"{objective} {count}" for objective, count in wild.items() if count)
    return f"diverged: {found}" if found else ""


def _setting(mine: Sequence[Finished], words: str) -> list[Row]:
    """Of one form, optimizer and rate."""
    to_plane = [middle(last(r, "end_to_end", "mse") / planes(r)) for r in mine]
    found = [_ratio(f"{words}: MSE, end-to-end / a plane", None, to_plane)]
    for what, name in (("mse", "MSE"), ("mae", "MAE"), ("grid_mse", "MSE on an even grid")):
        values = [middle(ratios(r, "lpa", "end_to_end", what)) for r in mine]
        printed = PUBLISHED["ratio"] if what == "mse" else None
        found.append(_ratio(f"{words}: {name}, LPA / end-to-end", printed, values))
    control = [middle(ratios(r, "lpa", "faster", "mse")) for r in mine]
    name = f"{words}: MSE, LPA / end-to-end at {FASTER:g} times the rate"
    found.append(_ratio(name, None, control))
    wins = [ratios(r, "lpa", "end_to_end", "mse") < 1 for r in mine]
    shown = f"{int(np.sum(wins))} of {np.size(wins)}"
    name = f"{words}: LPA below end-to-end"
    return [*found, Row(name, PUBLISHED["wins"], shown, note=diverged(mine))]


def _ratio(quantity: str, printed: float | None, values: list[float]) -> Row:
    """A row of ratios, of which one may be infinite."""
    if np.isinf(values).any():
        return Row(quantity, printed, "diverged")
    return over_seeds(quantity, printed, values)


def planes(result: Finished) -> np.ndarray:
    """The error of a plane on every surface."""
    from everydepth_papers.evidence.surfaces import plane_error

    points = result.cell["points"]
    return np.array([plane_error(name, points, result.seed) for name in result["networks"]])


def _overall(results: Sequence[Finished]) -> list[Row]:
    """Each optimizer at all of its rates and forms together."""
    names = {"end_to_end": "", "faster": f" at {FASTER:g} times the rate"}
    return [
        holds_in(
            f"Table 1: {by}, all rates and forms, LPA's MSE is below end-to-end's{ending}",
            PUBLISHED["wins"],
            cases(mine, over),
            lambda case: case["ratio"] < 1,
            diverged(mine),
            unit="networks",
            premises=[FITS],
        )
        for by in dict.fromkeys(r.cell["by"] for r in results)
        for over, ending in names.items()
        if (mine := where(results, by=by))
    ]


def _rising(results: Sequence[Finished]) -> list[Row]:
    """How the layers behave during training."""
    found: list[Row] = []
    for objective in OBJECTIVES[:2]:
        shares = [
            float(np.mean([n[objective]["rises"] for n in r["networks"].values()])) for r in results
        ]
        quantity = f"Fig. 3: share of layers whose error exceeds that of the one below, {objective}"
        note = "all recorded epochs, all settings"
        value = round(float(np.mean(shares)), 4)
        found.append(Row(quantity, PUBLISHED["by_layer"], value, note=note))
    every = [
        {"fits": float(fits), **{name: network[name]["rises"] for name in OBJECTIVES[:2]}}
        for r in results
        for network, fits in zip(r["networks"].values(), fitted(r), strict=True)
    ]
    return [
        *found,
        holds_in(
            "Fig. 3: in training, fewer layers exceed the one below with LPA than end-to-end",
            PUBLISHED["by_layer"],
            every,
            lambda case: case["lpa"] < case["end_to_end"],
            unit="networks",
            premises=[FITS],
        ),
    ]


def _rises(layers: Sequence[Sequence[float | None]]) -> float:
    """Of the epochs after the first: the share of steps from a layer to the next that rise."""
    steps = [
        b > a
        for epoch in layers[1:]
        for a, b in pairwise(epoch[1:])
        if a is not None and b is not None
    ]
    return float(np.mean(steps)) if steps else 0.0


def figure(results: Sequence[Finished]) -> Figure:
    """Above, the surface after each layer (Figure 2); below, each layer in training (Figure 3)."""
    from matplotlib.figure import Figure

    result = next((r for r in results if "drawn" in r.values), None)
    page = Figure(figsize=(13, 9), layout="constrained")
    if result is None:
        return page
    depths = len(result["drawn"]["lpa"])
    halves: Any = page.subfigures(2, 1)
    above, below = halves
    for line, objective in zip(above.subplots(2, depths), OBJECTIVES[:2], strict=True):
        for depth, axis in enumerate(line):
            values = np.array(result["drawn"][objective][depth], float)
            side = int(np.sqrt(len(values)))
            axis.imshow(values.reshape(side, side), cmap="viridis")
            axis.set(xticks=[], yticks=[], title=f"{objective}, {depth}")
    for axis, objective in zip(below.subplots(2, 1), OBJECTIVES[:2], strict=True):
        layers = np.array(result["layers"][objective], float)
        for depth in range(1, depths):
            axis.semilogy(result["epochs"], layers[:, depth], label=f"layer {depth}")
        axis.set(title=f"{objective}, {DRAWN.replace('_', ' ')}", xlabel="epoch", ylabel="MSE")
    below.axes[-1].legend(ncols=depths - 1, fontsize=8)
    return page


def cells(size: Cell, *, rates: slice = slice(None), forms: Sequence[str]) -> list[Cell]:
    found = [
        {"form": form, "by": by, "optimizer": optimizer, "schedule": schedule, "lr": lr, **size}
        for form in forms
        for by, (optimizer, schedule, every) in OPTIMIZERS.items()
        for lr in every[rates]
    ]
    # One is drawn, whatever it looks like: the first, plain SGD at its middle rate.
    first = next(c for c in found if c["lr"] == OPTIMIZERS["SGD"][2][1])
    return [{**one, "draw": DRAWN} if one is first else one for one in found]


ALL, TWO = tuple(FORMS), tuple(FORMS)[1:]
FEW: Cell = {"epochs": 40, "points": 2500, "every": 5}
RECIPE = Recipe(
    name="progressive_table1_grid",
    title="Table 1 under every reading: optimizers, rates and block forms",
    paper="progressive",
    item="Table 1, Figures 2 and 3",
    presets={
        "smoke": Preset(
            cells=cells(
                {"epochs": 2, "points": 225, "batch_size": 75, "every": 1},
                rates=slice(1, 2),
                forms=ALL,
            ),
            cost="3 s",
        ),
        "small": Preset(
            cells=[
                *cells(FEW, forms=("two maps",)),
                *cells(FEW, rates=slice(1, 2), forms=TWO),
            ],
            seeds=5,
            cost="15 min, 1 core",
        ),
        "paper": Preset(
            cells=cells({"epochs": 300, "points": 10_000}, forms=ALL),
            seeds=5,
            cost="9 h, 1 core",
            memory_gib=0.5,
        ),
    },
    cell=cell,
    rows=rows,
    figure=figure,
    about=(
        "The paper says neither which optimizer nor what its blocks are, so every combination is "
        "trained and every one is reported; rates were fixed beforehand. End-to-end at 1.5 times "
        "the rate is a control, because the weights of LPA add up to 1.5: what it gains, too, is "
        "no merit of the early depths. Errors are medians over the eight surfaces of a ratio, at "
        "random test points and on an even grid; a training that diverged has lost. The small "
        "preset takes 1,000 steps (40 epochs of 2,500 points), the paper's 30,000, and two of the "
        "block forms at the middle rate only."
    ),
)
