"""Reads ablations saved by earlier versions, and the gradients watched during training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from everydepth.ablations.result import Ablation
from everydepth.results import Result, Results, curve, gap, named
from everydepth.results.result import readable
from everydepth.results.results import class_of

SIDES = ("learning", "memorization")
Content = Mapping[str, Any]


def convert(name: str, content: Content, folder: Path) -> Results:
    """Results from an entry of results.json."""
    if name == "GradientWatch":
        return class_of(name)(results=named(*_gradient_watch(content)), kind=name)
    values = {key: value for key, value in content.items() if key != "format"}
    for key in ("runs", "untouched"):
        values[key] = {metric: np.array(v, dtype=float) for metric, v in content[key].items()}
    return Ablation.of(**values)


def _gradient_watch(content: Content) -> list[Result]:
    looks = content["epochs"]
    if not looks:
        return [gap("gradient_norms", "curve", "no epoch was measured")]
    epochs = [look["epoch"] for look in looks]
    words: dict[str, Any] = {"axis": "epoch", "section": "training"}
    norms = {
        f"{side}, layer {layer}": [look[f"{side}_norm"][layer] for look in looks]
        for side in SIDES
        for layer in looks[0][f"{SIDES[0]}_norm"]
    }
    labels = {key: f"{key}: ‖gradient of the loss‖" for key in norms}
    title = "Learning and memorization by epoch"
    found = [curve("gradient_norms", epochs, norms, labels=labels, title=title, **words)]
    for what, name, unit in (("margin", "margin", "logits"), ("error", "prediction error", "")):
        lines = {side: [look[f"{side}_{what}"] for look in looks] for side in SIDES}
        labels = {side: f"{side}: {name}" for side in SIDES}
        title = readable(name)
        found.append(curve(what, epochs, lines, labels=labels, title=title, unit=unit, **words))
    shares = {key: [look[key] for look in looks] for key in ("memorization", "train_accuracy")}
    labels = {
        "memorization": "memorized labels: share",
        "train_accuracy": "training accuracy: share",
    }
    return [*found, curve("shares", epochs, shares, labels=labels, unit="share", **words)]
