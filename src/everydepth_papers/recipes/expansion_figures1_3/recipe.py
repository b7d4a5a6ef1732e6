"""ResNets of several depths and widths: covariance, decay of the signal, test loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, over_seeds, published
from everydepth_papers.evidence.figures import band
from everydepth_papers.evidence.rows import holds_in, paired, where
from everydepth_papers.premise import Premise

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

PUBLISHED = published(__file__)
RAW_ROWS = 1024  # test images whose gradients are measured
RESOLVED = Premise(
    test="share that noise alone leaves within 10 %",
    value=lambda r: _mean(r, "within_10_noise"),
    least=0.9,
    failing="inconclusive",
)
LEARNED = Premise(
    test="test accuracy above a linear classifier's",
    value=lambda *case: min(r["accuracy"] - r["linear"] for r in case),
    failing="inconclusive",
)


def cell(settings: Cell, seed: int, folder: Path) -> Mapping[str, Any]:
    """Train one ResNet as `everydepth sweep` does; then gradients at all its states, test rows."""
    from everydepth.architectures.cifar_resnet import CifarResNet
    from everydepth.data import batches
    from everydepth.tracing import trace
    from everydepth_papers.commands.sweep import prepared, resnet_cell
    from everydepth_papers.evidence.baselines import linear_accuracy
    from everydepth_papers.evidence.gradients import raw_gradients

    found = resnet_cell(**settings, seed=seed, folder=folder / "training")
    del found["covariance"]  # of sums over positions
    names = ("data", "max_samples", "pool")
    train, test = prepared(**{name: settings[name] for name in names if name in settings})
    model = CifarResNet.from_pretrained(folder / "training" / "model").eval()
    seen = trace(model, test, "accuracy", batch_size=256, progress=False)
    part = test.subset(range(min(RAW_ROWS, len(test))))
    return {
        **found,
        "accuracy": float(seen["accuracy"][-1]),
        "linear": linear_accuracy(train, test),
        "raw": raw_gradients(model, batches(part, 64)),
    }


def rows(results: Sequence[Finished]) -> Sequence[Row]:
    found: list[Row] = []
    for data in dict.fromkeys(r.cell["data"] for r in results):
        mine = [r for r in results if r.cell["data"] == data]
        found += _covariance(mine, data)
        found += _decay(mine, data)
        found += _losses(mine, data)
    return found


def over_networks(quantity: str, said: str | None, values: Sequence[float], note: str) -> Row:
    """The mean over all networks, with the smallest and the largest value."""
    low, mean, high = (round(float(f(values)), 4) for f in (np.min, np.mean, np.max))
    return Row(quantity, said, mean, low, high, f"{len(values)} networks: {note}")


def _covariance(mine: Sequence[Finished], data: str) -> list[Row]:
    """Figure 1, Assumption 3 and Theorem 5: raw coordinates, rows not trained on, all depths."""
    words = "raw coordinates, test rows, mean over depths"

    def mean(key: str) -> list[float]:
        return [_mean(r, key) for r in mine]

    found = [
        holds_in(
            f"{data}, Fig. 1: covariances are near 0 off the diagonal",
            PUBLISHED["covariance"],
            mine,
            lambda r: _mean(r, "within_10") >= 0.9,
            "90 % of them within 10 % of the mean variance, mean over depths",
            unit="networks",
            premises=[LEARNED, RESOLVED],
        ),
        holds_in(
            f"{data}, Assumption 3: the largest eigenvalue is at most 10 times the largest "
            "variance",
            PUBLISHED["controlled"],
            mine,
            lambda r: _mean(r, "norm_over_variance") <= 10,
            "mean over depths",
            unit="networks",
            premises=[LEARNED],
        ),
    ]
    if not all("raw" in r.values for r in mine):  # results from before they were measured
        return found
    found += [
        over_networks(
            f"{data}, Fig. 1: share of off-diagonal entries within {percent} % of the mean "
            "variance",
            PUBLISHED["covariance"],
            mean(f"within_{percent}"),
            words,
        )
        for percent in (1, 10)
    ]
    found += [
        over_networks(
            f"{data}, Fig. 1: what estimation alone leaves within 10 %",
            None,
            mean("within_10_noise"),
            "half the difference of two halves of the rows",
        ),
        over_networks(
            f"{data}, Assumption 3: largest eigenvalue over the largest variance",
            PUBLISHED["controlled"],
            mean("norm_over_variance"),
            words,
        ),
        over_networks(
            f"{data}, Theorem 5: how often mean gradients of disjoint quarters disagree",
            None,
            mean("disagree"),
            "200 draws at every depth",
        ),
    ]
    beyond = [max(_beyond(one) for one in r["raw"]) for r in mine]
    says = [any(one["disagree_bound"] < 1 for one in r["raw"]) for r in mine]
    cases = [value for value, yes in zip(beyond, says, strict=True) if yes]
    found.append(
        holds_in(
            f"{data}, Theorem 5: the frequency stays below the bound at every depth",
            PUBLISHED["bound"],
            cases,
            lambda value: value <= 0,
            f"the bound says something (is below 1) in {len(cases)} of {len(mine)}",
            unit="networks",
        )
    )
    return found


def _mean(result: Finished, key: str) -> float:
    """The mean over depths."""
    return float(np.mean([one[key] for one in result["raw"]]))


def _beyond(one: Mapping[str, Any]) -> float:
    """How far the frequency of disagreement exceeds the bound."""
    return one["disagree"] - one["disagree_bound"]


def _decay(mine: Sequence[Finished], data: str) -> list[Row]:
    """Figure 2, each curve over its own value at the shallowest depth (c, d)."""
    found: list[Row] = []
    shallow, deep = _ends(mine, "layers")
    for width in _values(mine, "width"):
        pairs = _paired(mine, ("width", width), "layers", shallow, deep)
        found.append(
            over_seeds(
                f"{data}, Fig. 2(c, d): signal at depth {deep} over that at depth {shallow}, "
                f"width {width}",
                PUBLISHED["decay"],
                [b["signal"] / a["signal"] for a, b in pairs],
                "below 1 is a decay",
            )
        )
        found.append(
            holds_in(
                f"{data}, Fig. 2: the signal is weaker at depth {deep}, width {width}",
                PUBLISHED["decay"],
                pairs,
                lambda a, b: b["signal"] < a["signal"],
                premises=[LEARNED],
            )
        )
    return found


def _losses(mine: Sequence[Finished], data: str) -> list[Row]:
    found: list[Row] = []
    shallow, deep = _ends(mine, "layers")
    narrow, wide = _ends(mine, "width")
    for width in _values(mine, "width"):
        pairs = _paired(mine, ("width", width), "layers", shallow, deep)
        what = f"{data}, Fig. 3: test loss at depth {deep} minus depth {shallow}, width {width}"
        gaps = [b["test_loss"] - a["test_loss"] for a, b in pairs]
        found.append(over_seeds(what, PUBLISHED["depth"], gaps))
        if width == wide:
            found.append(
                holds_in(
                    f"{data}, Fig. 3: deeper is better at width {wide}",
                    PUBLISHED["depth"],
                    pairs,
                    lambda a, b: b["test_loss"] < a["test_loss"],
                    premises=[LEARNED],
                )
            )
        found += _fitted(mine, width, data)
    for layers in _values(mine, "layers"):
        pairs = _paired(mine, ("layers", layers), "width", narrow, wide)
        what = f"{data}, Fig. 3: test loss at width {wide} minus width {narrow}, depth {layers}"
        gaps = [b["test_loss"] - a["test_loss"] for a, b in pairs]
        found.append(over_seeds(what, PUBLISHED["width"], gaps))
        found.append(
            holds_in(
                f"{data}, Fig. 3: wider is better at depth {layers}",
                PUBLISHED["width"],
                pairs,
                lambda a, b: b["test_loss"] < a["test_loss"],
                premises=[LEARNED],
            )
        )
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
    results: Sequence[Finished], fixed: tuple[str, int], name: str, a: int, b: int
) -> list[tuple[Finished, Finished]]:
    """Seed by seed: the network at one end and at the other."""
    mine = where(results, **{fixed[0]: fixed[1]})
    return paired(where(mine, **{name: a}), where(mine, **{name: b}))


def _fitted(mine: Sequence[Finished], width: int, data: str) -> list[Row]:
    """App. M: how the loss falls from depth to depth, where there are enough depths for a fit."""
    from everydepth.errors import DataError
    from everydepth_papers.evidence.depth_law import fit_depth

    at = _values(mine, "layers")
    own = where(mine, width=width)
    losses = [np.mean([r["test_loss"] for r in own if r.cell["layers"] == depth]) for depth in at]
    quantity = f"{data}, App. M: exponent beta of the decrease with depth, width {width}"
    try:
        law = fit_depth(losses, floor=0.0)
    except DataError as reason:
        return [Row(quantity, None, None, note=str(reason))]
    return [Row(quantity, None, round(law.beta, 3), note=f"{len(at)} depths, floor 0, mean losses")]


def figure(results: Sequence[Finished]) -> Figure:
    """A row for each data set: Figures 1(a-c), 1(d), 2(a, b), 2(c, d), 3 by depth and by width."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(r.cell["data"] for r in results))
    # Results from before gradients were looked at by coordinate have no Figure 1.
    extra = 2 if all("raw" in r.values for r in results) else 0
    drawn = Figure(figsize=(3.2 * (4 + extra), 3 * len(names)), layout="constrained")
    axes = drawn.subplots(len(names), 4 + extra, squeeze=False)
    for row, data in zip(axes, names, strict=True):
        mine = [r for r in results if r.cell["data"] == data]
        if extra:
            _draw_covariance(drawn, row[:2], [r["raw"] for r in mine])
        curves = row[extra:]
        curves[0].set_title(data.split("/")[-1], fontsize=9)
        least = _values(mine, "layers")[0]
        first = {(r.cell["width"], r.seed): r["signal"] for r in mine if r.cell["layers"] == least}
        for axis, words, x, by, read in (
            (curves[0], "signal", "layers", "width", lambda r: r["signal"]),
            (
                curves[1],
                "signal / that of the shallowest",
                "layers",
                "width",
                lambda r, first=first: r["signal"] / first[r.cell["width"], r.seed],
            ),
            (curves[2], "test loss", "layers", "width", lambda r: r["test_loss"]),
            (curves[3], "test loss", "width", "layers", lambda r: r["test_loss"]),
        ):
            for group in _values(mine, by):
                own = where(mine, **{by: group})
                at = _values(own, x)
                values = [[read(r) for r in own if r.cell[x] == place] for place in at]
                band(axis, at, np.array(values).T, f"{by} {group}")
            axis.set(xlabel=x, ylabel=words, xticks=_values(mine, x))
            axis.legend(fontsize=8)
        curves[0].set_yscale("log")
    return drawn


def _draw_covariance(drawn: Any, axes: Any, raw: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Figure 1(a-c), of the middle depth of one network, and 1(d), of all of them."""
    from everydepth_papers.evidence.gradients import EDGES

    last = raw[-1]
    place = len(last) // 2
    image = axes[0].imshow(np.array(last[place]["matrix"]), cmap="RdBu_r", vmin=-1, vmax=1)
    axes[0].set_title(f"covariance / mean variance, depth {place}", fontsize=9)
    drawn.colorbar(image, ax=axes[0])
    counts = np.sum([one["histogram"] for network in raw for one in network], 0)
    middle = (EDGES[1:] + EDGES[:-1]) / 2
    axes[1].bar(middle, counts / counts.sum(), width=EDGES[1] - EDGES[0])
    axes[1].set(yscale="log", xlabel="off-diagonal covariance / mean variance", ylabel="share")
    axes[1].set_title("all networks and depths", fontsize=9)


def resnet(layers: int, width: int, labels: int) -> nn.Module:
    from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig

    return CifarResNet(CifarResNetConfig.of_depth(layers, width=width, num_labels=labels))


def grid(depths: Sequence[int], widths: Sequence[int], **fixed: Any) -> list[Cell]:
    return [{"layers": d, "width": w, "lr": 0.1, **fixed} for d in depths for w in widths]


# By rule, before it was run: as many images as the ResNet of progressive_tables2_3 needed to pass a
# linear classifier, as small and as narrow as there, and twice that width.
QUICK = {"batch_size": 32, "pool": 2, "max_samples": 20_000, "epochs": 3, "augment": False}
# Fixed before it was run.
FULL = {"batch_size": 32, "max_samples": 10_000, "epochs": 15}
PAPER = {"batch_size": 32, "epochs": 1000, "stop_below": 1e-4, "max_samples": None}
DEPTHS, WIDTHS = range(8, 57, 6), range(4, 69, 4)  # 9 x 17, and 5 seeds: 765 networks

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
            cells=grid((8, 14, 20), (8, 16), data="fashion-mnist", **QUICK),
            seeds=3,
            cost="20 min, 1 core",
            needs=("fashion-mnist",),
        ),
        "full": Preset(
            cells=[
                *grid((8, 14, 20), (4, 8, 16), data="fashion-mnist", **FULL),
                *grid((8, 14, 20), (4, 8, 16), data="cifar10", **FULL),
            ],
            seeds=5,
            cost="about 15 h, 1 core",
            needs=("fashion-mnist", "cifar10"),
        ),
        "paper": Preset(
            cells=[
                *grid(DEPTHS, WIDTHS, data="uoft-cs/cifar10", at_least=200, **PAPER),
                *grid(DEPTHS, WIDTHS, data="uoft-cs/cifar100", at_least=300, **PAPER),
            ],
            seeds=5,
            cost="1,530 runs of up to 1,000 epochs: hundreds of GPU days",
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
        "Depths and widths of the paper are lost in its text but for the count of 765 networks "
        "on CIFAR-10; ours are nine depths 6n+2, 17 widths and 5 seeds, which is as many. SGD, "
        "momentum .9, weight decay 1e-4, learning rate .1, batches of 32, crops and "
        "mirror images, early stop on the training loss, as in App. N. The small preset sees "
        "20,000 images of Fashion-MNIST, shrunk by 2, three times, without crops, mirror images or "
        "early stop. Networks of its first runs (800 images of two data sets; 3,000 images) stayed "
        "below a linear classifier. Covariances are "
        "those of gradients at raw coordinates of every state, on test images; shares are relative "
        "to the mean variance. Bands in figures are the smallest and the largest seed."
    ),
)
