"""Skips keep features from rotating: Figure 12, an MLP with and without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, over_seeds, published
from everydepth_papers.evidence.figures import band
from everydepth_papers.evidence.rows import holds_in, learned, numbers, paired, where

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

PUBLISHED = published(__file__)
LEARNED = learned("linear", "a linear classifier's")


def build(settings: Cell) -> nn.Module:
    from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig

    return ResidualMLP(
        ResidualMLPConfig(
            num_inputs=settings["inputs"],
            num_outputs=10,
            hidden_size=settings["width"],
            num_hidden_layers=settings["depth"],
            skips=settings["skips"],
            regression=False,
        )
    )


def flat(batch: dict[str, Any], generator: Any = None) -> dict[str, Any]:
    """Images as rows of numbers from -1 to 1."""
    pixels = batch["pixel_values"].flatten(1)
    pixels = pixels if pixels.is_floating_point() else pixels.float() / 255
    return {"inputs": 2 * pixels - 1, "labels": batch["labels"]}


def cell(settings: Cell, seed: int, folder: Path) -> Mapping[str, Any]:
    import torch

    import everydepth as ed
    from everydepth.data import Images, batches, load
    from everydepth_papers.evidence.baselines import linear_accuracy

    torch.manual_seed(seed)
    parts = (load(settings["data"], kind=Images, split=split) for split in ("train", "test"))
    train, test = (part.first(settings["rows"]) for part in parts)
    model = build(settings)
    ed.fit(
        ed.EveryDepth(model, ed.end_to_end()),
        batches(train, 64, shuffle=True, seed=seed, transform=flat),
        epochs=settings["epochs"],
        lr=settings["lr"],
        seed=seed,
        progress=False,
    )
    shown = batches(test, 250, transform=flat)
    seen = ed.trace(model, shown, ("accuracy", "cos", "cka"), progress=False)
    return {
        "linear": linear_accuracy(train, test),
        "accuracy": numbers(seen["accuracy"]),
        "cos": numbers(seen["cos"][:, -1]),
        "cka": numbers(seen["cka"][:, -1]),
    }


def correlation(result: Finished, a: str, b: str) -> float:
    """The correlation of two measurements over depths 0..L."""
    return float(np.corrcoef(result[a], result[b])[0, 1])


def gap(result: Finished) -> float:
    """How much more alike CKA finds the depths below the last than COS does."""
    return float(np.mean(np.subtract(result["cka"], result["cos"])[:-1]))


def rows(results: Sequence[Finished]) -> list[Row]:
    groups = {"with": where(results, skips=True), "without": where(results, skips=False)}
    found: list[Row] = []
    for name, group in groups.items():
        for a, b in (("cka", "accuracy"), ("cos", "accuracy"), ("cka", "cos")):
            found.append(
                over_seeds(
                    f"{name} skips: correlation of {a} and {b} over depths",
                    PUBLISHED[name] if a == "cka" and b == "accuracy" else None,
                    [correlation(r, a, b) for r in group],
                )
            )
        found.append(
            over_seeds(f"{name} skips: CKA minus COS, mean", None, [gap(r) for r in group])
        )
        found.append(
            over_seeds(f"{name} skips: accuracy", None, [r["accuracy"][-1] for r in group])
        )
        found.append(
            over_seeds(
                f"{name} skips: accuracy below the last layer",
                None,
                [float(np.mean(r["accuracy"][:-1])) for r in group],
            )
        )
    both = paired(groups["with"], groups["without"])
    return [
        *found,
        holds_in(
            "Fig. 12: CKA exceeds COS by more without skips (it does not see rotation)",
            PUBLISHED["rotation"],
            both,
            lambda w, wo: gap(wo) > gap(w),
            premises=[LEARNED],
        ),
        holds_in(
            "Fig. 12: CKA follows accuracy better with skips",
            PUBLISHED["with"],
            both,
            lambda w, wo: correlation(w, "cka", "accuracy") > correlation(wo, "cka", "accuracy"),
            premises=[LEARNED],
        ),
        holds_in(
            "Fig. 12: with skips the readout works below the last layer, without it does not",
            PUBLISHED["without"],
            both,
            lambda w, wo: np.mean(w["accuracy"][:-1]) > np.mean(wo["accuracy"][:-1]) + 0.1,
            "mean accuracy over depths 0 to L-1, a difference above 10 points",
            premises=[LEARNED],
        ),
    ]


def figure(results: Sequence[Finished]) -> Figure:
    from matplotlib.figure import Figure

    page = Figure(figsize=(9, 3.5), layout="constrained")
    for axis, skips in zip(page.subplots(1, 2, sharey=True), (False, True), strict=True):
        group = where(results, skips=skips)
        for name in ("accuracy", "cos", "cka"):
            values = [r[name] for r in group]
            band(axis, range(len(values[0])), values, name)
        axis.set(title=f"{'with' if skips else 'without'} skips", xlabel="depth (blocks)")
        axis.legend()
    return page


SMALL: Cell = {
    "data": "fashion-mnist", "rows": 60_000, "inputs": 784, "depth": 6, "width": 64, "epochs": 5,
    "lr": 1e-3,
}  # fmt: skip
SMOKE: Cell = {**SMALL, "data": "digits", "rows": 300, "inputs": 64, "depth": 3, "epochs": 2}
PAPER: Cell = {
    **SMALL, "data": "uoft-cs/cifar10", "rows": 50_000, "inputs": 3072, "depth": 12, "width": 384,
    "epochs": 200,
}  # fmt: skip


def cells(settings: Cell) -> list[Cell]:
    return [{**settings, "skips": skips} for skips in (True, False)]


RECIPE = Recipe(
    name="tracing_skips",
    title="Skips eliminate rotation: COS against CKA in an MLP",
    paper="tracing",
    item="Figure 12",
    presets={
        "smoke": Preset(cells=cells(SMOKE), cost="1 s"),
        "small": Preset(
            cells=cells(SMALL), seeds=5, cost="5 min, 1 core", needs=("fashion-mnist",)
        ),
        "paper": Preset(
            cells=cells(PAPER),
            cost="1 h on a GPU",
            needs=("uoft-cs/cifar10",),
            models={"MLP": lambda: build({**PAPER, "skips": True})},
        ),
    },
    cell=cell,
    rows=rows,
    figure=figure,
    about=(
        "The paper does not describe its MLP. Small: 6 blocks of width 64, two linear maps each, "
        "on Fashion-MNIST, five passes (on 10,000 of its images the network without skips stayed "
        "below a linear classifier); paper: 12 blocks of width 384 on CIFAR-10 (ours)."
    ),
)
