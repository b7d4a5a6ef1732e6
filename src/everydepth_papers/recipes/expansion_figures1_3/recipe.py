"""ResNets of several depths and widths: covariance, decay of the signal, test loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, over_seeds, published

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

PUBLISHED = published(__file__)
PLACES = ("before the classifier", "middle block")


def cell(settings: Cell, seed: int, folder: Path) -> Mapping[str, Any]:
    from everydepth.cli.sweep import resnet_cell

    return resnet_cell(**settings, seed=seed, folder=folder / "training")


def rows(results: Sequence[Finished]) -> Sequence[Row]:
    found: list[Row] = []
    for data in dict.fromkeys(r.cell["data"] for r in results):
        mine = [r for r in results if r.cell["data"] == data]
        found += _covariance(mine, data)
        found += _decay(mine, data)
        found += _losses(mine, data)
    return found


def over_networks(quantity: str, said: str, values: Sequence[float], note: str) -> Row:
    """The mean over all networks, with the smallest and the largest value."""
    low, mean, high = (round(float(f(values)), 4) for f in (np.min, np.mean, np.max))
    return Row(quantity, said, mean, low, high, f"{len(values)} networks: {note}")


def _covariance(mine: Sequence[Finished], data: str) -> list[Row]:
    return [
        over_networks(
            f"{data}, Fig. 1: share of off-diagonal entries within {percent} % of the mean "
            f"variance, {place}",
            PUBLISHED["covariance"],
            [r["covariance"][place][key] for r in mine],
            "all depths, widths and seeds",
        )
        for place in PLACES
        for percent, key in ((1, "within_1"), (10, "within_10"))
    ]


def _decay(mine: Sequence[Finished], data: str) -> list[Row]:
    found: list[Row] = []
    shallow, deep = _ends(mine, "layers")
    for width in _values(mine, "width"):
        pairs = _paired(mine, ("width", width), "layers", shallow, deep, "signal")
        found.append(
            over_seeds(
                f"{data}, Fig. 2: signal at depth {deep} over that at depth {shallow}, "
                f"width {width}",
                PUBLISHED["decay"],
                [b / a for a, b in pairs],
                "below 1 is a decay",
            )
        )
    return found


def _losses(mine: Sequence[Finished], data: str) -> list[Row]:
    found: list[Row] = []
    shallow, deep = _ends(mine, "layers")
    narrow, wide = _ends(mine, "width")
    for width in _values(mine, "width"):
        pairs = _paired(mine, ("width", width), "layers", shallow, deep, "test_loss")
        what = f"{data}, Fig. 3: test loss at depth {deep} minus depth {shallow}, width {width}"
        found.append(over_seeds(what, PUBLISHED["depth"], [b - a for a, b in pairs]))
    for layers in _values(mine, "layers"):
        pairs = _paired(mine, ("layers", layers), "width", narrow, wide, "test_loss")
        what = f"{data}, Fig. 3: test loss at width {wide} minus width {narrow}, depth {layers}"
        found.append(over_seeds(what, PUBLISHED["width"], [b - a for a, b in pairs]))
    for width in (narrow, wide):
        cosines = [r["alignment"] for r in mine if r.cell["width"] == width]
        what = f"{data}: cosine of the mean gradients of training and test data, width {width}"
        found.append(over_networks(what, PUBLISHED["alignment"], cosines, "all depths and seeds"))
    return found


def _values(results: Sequence[Finished], name: str) -> list[int]:
    return sorted({r.cell[name] for r in results})


def _ends(results: Sequence[Finished], name: str) -> tuple[int, int]:
    values = _values(results, name)
    return values[0], values[-1]


def _paired(
    results: Sequence[Finished], fixed: tuple[str, int], name: str, a: int, b: int, what: str
) -> list[tuple[float, float]]:
    """Seed by seed: the value at one end and at the other."""
    mine = [r for r in results if r.cell[fixed[0]] == fixed[1]]
    ends = [{r.seed: r[what] for r in mine if r.cell[name] == end} for end in (a, b)]
    return [(ends[0][seed], ends[1][seed]) for seed in sorted(ends[0])]


def figure(results: Sequence[Finished]) -> Figure:
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(r.cell["data"] for r in results))
    drawn = Figure(figsize=(16, 3.6 * len(names)), layout="constrained")
    axes = drawn.subplots(len(names), 4, squeeze=False)
    for row, data in zip(axes, names, strict=True):
        mine = [r for r in results if r.cell["data"] == data]
        matrix = np.array(mine[-1]["covariance"][PLACES[0]]["matrix"])
        image = row[0].imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1)
        row[0].set_title(f"{data}: covariance / mean variance,\n{PLACES[0]}")
        drawn.colorbar(image, ax=row[0])
        for axis, what, x, by in (
            (row[1], "signal", "layers", "width"),
            (row[2], "test_loss", "layers", "width"),
            (row[3], "test_loss", "width", "layers"),
        ):
            for group in _values(mine, by):
                _curve(axis, [r for r in mine if r.cell[by] == group], what, x, f"{by} {group}")
            axis.set(xlabel=x, ylabel=what.replace("_", " "))
            axis.legend()
        row[1].set_yscale("log")
    return drawn


def _curve(axis: Any, mine: Sequence[Finished], what: str, x: str, label: str) -> None:
    at = _values(mine, x)
    values = [[r[what] for r in mine if r.cell[x] == place] for place in at]
    mean, std = np.array([np.mean(v) for v in values]), np.array([np.std(v) for v in values])
    axis.plot(at, mean, marker="o", label=label)
    axis.fill_between(at, mean - std, mean + std, alpha=0.2)


def resnet(layers: int, width: int, labels: int) -> nn.Module:
    from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig

    return CifarResNet(CifarResNetConfig.of_depth(layers, width=width, num_labels=labels))


def grid(depths: Sequence[int], widths: Sequence[int], **fixed: Any) -> list[Cell]:
    return [{"layers": d, "width": w, "lr": 0.1, **fixed} for d in depths for w in widths]


QUICK = {"batch_size": 32, "pool": 2, "max_samples": 800, "stop_below": 0.002, "at_least": 6}
PAPER = {"batch_size": 32, "epochs": 1000, "stop_below": 1e-4, "max_samples": None}
DEPTHS, WIDTHS = (8, 14, 20, 26, 32, 38, 44, 50, 56), (4, 8, 16, 32, 64)

RECIPE = Recipe(
    name="expansion_figures1_3",
    title="Covariance, decay of the signal, and test loss against depth and width",
    paper="expansion",
    item="Figures 1, 2 and 3",
    presets={
        "smoke": Preset(
            cells=grid(
                (8, 14), (2, 4), data="digits", epochs=1, batch_size=64, max_samples=128, pool=1
            ),
            cost="5 s, 1 core",
        ),
        "small": Preset(
            cells=[
                *grid((8, 14, 20), (4, 8), data="fashion-mnist", epochs=8, **QUICK),
                *grid((8, 14, 20), (4, 8), data="cifar10", epochs=8, **QUICK),
            ],
            seeds=3,
            cost="2 min, 1 core",
            needs=("fashion-mnist", "cifar10"),
        ),
        "paper": Preset(
            cells=[
                *grid(DEPTHS, WIDTHS, data="uoft-cs/cifar10", at_least=200, **PAPER),
                *grid(DEPTHS, WIDTHS, data="uoft-cs/cifar100", at_least=300, **PAPER),
            ],
            seeds=5,
            cost="450 trainings of up to 1,000 epochs: some hundred GPU days",
            needs=("uoft-cs/cifar10", "uoft-cs/cifar100"),
            models={
                f"depth {d}, width {w}": lambda d=d, w=w: resnet(d, w, 10)
                for d in (DEPTHS[0], DEPTHS[-1])
                for w in (WIDTHS[0], WIDTHS[-1])
            },
        ),
    },
    cell=cell,
    rows=rows,
    figure=figure,
    about=(
        "Depths and widths of the paper are lost in its text; ours are those usual for 6n+2 "
        "networks. SGD, momentum .9, weight decay 1e-4, learning rate .1, batches of 32, crops and "
        "mirror images, early stop on the training loss, as in App. N. The small preset uses 800 "
        "training images shrunk by 2 and at most 8 epochs. At the layer before the classifier the "
        "mean gradient is W^T (E p - E y) and the covariance has rank K - 1, so that near "
        "independence of coordinates is measured relative to their mean variance, and at a middle "
        "block as well."
    ),
)
