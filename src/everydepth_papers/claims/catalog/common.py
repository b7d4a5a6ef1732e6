"""What claims of several papers share: the networks, what they must have learned, numbers."""

from __future__ import annotations

import numpy as np

from everydepth_papers.claims.facts import Facts
from everydepth_papers.premise import Premise
from everydepth_papers.statistics import spearman

PAIR = "it compares two training runs of the same network; do both and compare their reports"
CLASSIFIERS = {"ViT": ("vit:end_to_end",), "ResNet": ("resnet:end_to_end",)}
TRANSFORMER = {"ViT": ("vit:end_to_end",)}
LEARNED = Premise(
    test="skill",
    value=lambda *facts: min(f["skill"] for f in facts),
    failing="inconclusive",
)
"""Accuracy minus a linear classifier's, of every network compared; see `standard`."""


def pairs(training: str, *kinds: str) -> dict[str, tuple[str, ...]]:
    names = {"vit": "ViT", "resnet": "ResNet", "lm": "LM", "mlp": "MLP"}
    return {names[kind]: (f"{kind}:{training}", f"{kind}:end_to_end") for kind in kinds}


def at_half(curve: np.ndarray) -> float:
    """The value at half the depth."""
    return float(curve[len(curve) // 2])


def by_layer(values: np.ndarray) -> float:
    """Rank correlation with the layer."""
    return spearman(values, np.arange(len(values), dtype=float))


def mean_accuracy(facts: Facts) -> float:
    return float(facts["accuracy"][1:].mean())
