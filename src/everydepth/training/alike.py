"""Depths at which the rows of a batch look alike to a readout made for the last depth."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from everydepth.stream import evaluating
from everydepth.training.module import EveryDepth

if TYPE_CHECKING:
    from everydepth.training.loop import Training

ROWS = 8  # fewer say little
FACTOR = 10.0  # MiniLM as published: 20 to 500; ResNet-56: 4 at most; random networks: 2


class AlikeRowsWarning(UserWarning):
    """Below the last depth rows hardly differ, so a shared readout learns slowly there."""


def warn_if_alike(training: Training, batch: Mapping[str, Any]) -> None:
    """Look at the first batch before training on it; every process takes part."""
    net, last = training.net, training.net.stream.depth
    weights = net.objective.expected_weights(0, training.total_steps, last).tolist()
    below = [d for d in range(1, last) if weights[d] > 0 and net.own_head(d) is None]
    if net.stream.task != "classification" or not below:
        return
    with torch.no_grad(), torch.random.fork_rng(), training.autocast(), evaluating(net):
        found: dict[int, float] = training.called(measure=spreads, **batch)
    alike = [depth for depth in below if found and FACTOR * found[depth] < found[last]]
    if 2 * len(alike) > len(below) and training.accelerator.is_main_process:
        most = max(found[depth] for depth in alike)
        warnings.warn(
            f"at depths {', '.join(map(str, alike))} the rows of the first batch differ by at most "
            f"{100 * most:.1f} % of their size, at the last depth by {100 * found[last]:.1f} %: a "
            "readout shared with it can hardly tell them apart, and these depths may predict one "
            "class for a long time. Instead, train the last depth, then exits: "
            "ed.fit(ed.EveryDepth(model, ed.end_to_end()), train, ...); "
            f"ed.fit(ed.balcony(model, {below}), train, ...)",
            AlikeRowsWarning,
            stacklevel=2,
        )


def spreads(net: EveryDepth, batch: Mapping[str, Any]) -> dict[int, float]:
    """By depth, how far features lie from their mean, relative to their size; a measure of
    `EveryDepth`. Empty for few rows, or for several predictions per row."""
    states = net.stream.observe(batch)
    found: dict[int, float] = {}
    for depth in range(1, net.stream.depth + 1):
        feature = states.feature(depth).float()
        if feature.ndim != 2 or len(feature) < ROWS:
            return {}
        around = feature - feature.mean(0)
        found[depth] = float(around.norm() / feature.norm())
    return found
