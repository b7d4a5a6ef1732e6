"""ResNet-56 from its published weights to a network that is usable at every rung."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import TYPE_CHECKING

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, in_stages, later
from everydepth_papers.evidence.rows import steps_of, where

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn

PUBLISHED = 93.39  # % of the test images, as the authors of the weights state


def build() -> nn.Module:
    from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig

    return CifarResNet(CifarResNetConfig.of_depth(56, shortcut="pad", num_labels=10))


def rows(results: Sequence[Finished]) -> list[Row]:
    found: list[Row] = []
    for result in results:
        last = result["rungs"][-1]
        arm = "as published" if result.cell["marks"] == [0] else result.cell["arm"]
        steps = f"{steps_of(result)}, {result['cpu_seconds'] / 60:.1f} CPU min"
        for depth, blocks in zip(result["rungs"], result["blocks"], strict=True):
            shown = PUBLISHED if depth == last == 27 else None
            value = round(100 * result["accuracy"][depth - 1], 2)
            what = f"{arm}, accuracy, depth {depth} of {last}"
            found.append(Row(what, shown, value, note=f"{blocks} blocks; {steps}"))
        if "exits" in result.values:
            seen = result["exits"]
            note = f"accuracy lost at most {seen['risk']:g}; {seen['note']}"
            left = f"{arm}, early exit at the rungs"
            found += [
                Row(f"{left}, accuracy", None, round(100 * seen["accuracy"], 2), note=note),
                Row(f"{left}, of full depth", None, round(100 * seen["accuracy_full"], 2)),
                Row(f"{left}, blocks a picture, of {last}", None, round(blocks_run(result), 2)),
                Row(f"{left}, clock", None, round(seen["measured_speedup"], 3), note="ratio"),
            ]
    return found


def blocks_run(result: Finished) -> float:
    """Of a picture on average: with the balconies of all depths where pictures leave before it."""
    left: list[int] = result["exits"]["left"]
    more = {
        depth: blocks - depth
        for depth, blocks in zip(result["rungs"], result["blocks"], strict=True)
        if left[depth - 1]
    }
    each = [k + sum(n for d, n in more.items() if d <= k) for k in range(1, len(left) + 1)]
    return sum(map(mul, left, each)) / sum(left)


def figure(results: Sequence[Finished]) -> Figure:
    """Accuracy by the number of blocks that run, before and after; balconies where they stand."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(5.2, 3.9), layout="constrained")
    axis = drawn.subplots()
    for arm in dict.fromkeys(result.cell["arm"] for result in results):
        for result in where(results, arm=arm):
            label = f"{arm}, {result['cpu_seconds'] / 60:.0f} CPU min"
            if result.cell["marks"] == [0]:
                label = "as published"
            values = [100 * value for value in result["accuracy"]]
            if result["blocks"] == result["rungs"]:
                axis.plot(range(1, len(values) + 1), values, marker=".", label=label)
            else:
                chosen = [values[depth - 1] for depth in result["rungs"]]
                axis.plot(result["blocks"], chosen, marker="o", linestyle="--", label=label)
    blocks = results[0]["rungs"][-1]
    axis.set(xlabel=f"blocks that run, of {blocks}", ylabel="accuracy on test images (%)")
    axis.legend(fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return drawn


SMALL: Cell = {
    "model": "resnet56", "data": "cifar10", "test_rows": 10_000, "batch": 64, "lr": 0.01,
    "precision": "fast", "save_every": 100,
}  # fmt: skip
SMOKE: Cell = {
    "model": "tiny", "data": "digits", "test_rows": 200, "batch": 8, "lr": 0.01, "save_every": 1,
}  # fmt: skip
LADDER, EXITS = "ladder+distilled", {"exits": True, "risk": 0.01}
# New blocks learn at the rate of training from scratch, tuned ones at a tenth of it.
EPOCHS = 782, 3910  # steps of one and of five
BALCONY: Cell = {**SMALL, "arm": "balcony", "lr": 0.05, "save_every": 391}
SMOKE_EXITS = {"exits": True, "risk": 0.5}

RECIPE = Recipe(
    name="resnet56",
    title="ResNet-56 on CIFAR-10, usable at every rung",
    item="A pretrained model",
    presets={
        "smoke": Preset(
            cells=[
                *in_stages((0, 2), SMOKE_EXITS, arm=LADDER, **SMOKE),
                *in_stages((2,), SMOKE_EXITS, arm="balcony", **SMOKE),
            ],
            cost="2 s",
        ),
        "small": Preset(
            cells=[
                *in_stages((0,), {}, arm=LADDER, **SMALL),
                *in_stages(EPOCHS[:1], EXITS, **BALCONY),
            ],
            cost="5 min of one core",
            needs=("resnet-cifar10", "cifar10"),
            memory_gib=3.0,
        ),
        "paper": Preset(
            cells=[
                *in_stages((0,), {}, arm=LADDER, **SMALL),
                *in_stages(EPOCHS, EXITS, **BALCONY),
                *in_stages(EPOCHS, EXITS, arm=LADDER, **SMALL),
            ],
            cost="35 min of one core",
            needs=("resnet-cifar10", "cifar10"),
            models={"resnet56": build},
            memory_gib=3.0,
        ),
    },
    cell=later("cifar_tuning:cell"),
    rows=rows,
    figure=figure,
    about=(
        "balcony: the network is frozen, and copies of its later blocks (the first of each stage "
        "and the last two) lead from depths 7, 14 and 21 to its head. "
        "`ladder().distilled()`: all of it is tuned, four depths learn from labels and from the "
        "last depth. SGD, 64 images a step, crops and mirror images, in bfloat16 if the CPU has "
        "instructions for it. `resnet-cifar10` "
        "under EVERYDEPTH_DATA has resnet56.safetensors, input in 0..1, normalized as ImageNet's. "
        "Thresholds of the early exit are calibrated on one half of the test images and judged on "
        "the other; a picture runs the balconies of all depths where it might have left. small: "
        "balconies alone, one epoch; paper: one and five epochs, and of the ladder, too; with the "
        "same --run the one goes on where the other stopped."
    ),
)
