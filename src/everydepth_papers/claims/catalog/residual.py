"""Claims of Residual Relay."""

from __future__ import annotations

from functools import partial

import numpy as np

from everydepth_papers.claims.catalog.common import CLASSIFIERS, LEARNED, TRANSFORMER, by_layer
from everydepth_papers.claims.claim import Claim
from everydepth_papers.premise import Premise
from everydepth_papers.statistics import spearman

NOISE = "it needs to know which training labels are wrong; see `everydepth ablate` and `audit`"


def _memorized(*arms: str) -> Premise:
    """Networks that did not fit their labels say nothing about memorization."""
    return Premise(
        test="training accuracy, wrong labels included",
        value=lambda f: min(f[f"{arm}_train_accuracy"] for arm in arms),
        least=0.99,
    )


def _thirds(values: np.ndarray) -> tuple[float, float]:
    """Mean over the first and over the last third of the layers."""
    third = max(1, len(values) // 3)
    return float(values[:third].mean()), float(values[-third:].mean())


def _early_against_late(values: np.ndarray) -> float:
    first, last = _thirds(values)
    return first - last


CLAIMS = (
    Claim(
        name="memorization-survives-removal",
        paper="residual",
        source="Figure 1a",
        statement="Residual connections have no impact on memorization.",
        test="memorized share, skips of the first or last layer removed in training (the smaller), "
        "minus untouched",
        relation=">=",
        threshold=-0.05,
        cells={
            "ViT": ("noisy:arms",),
        },
        value=lambda f: (
            min(f["first_memorization"], f["last_memorization"]) - f["whole_memorization"]
        ),
        # That the other arms fitted is not a premise but the question.
        premises=(_memorized("whole"),),
        own=NOISE,
    ),
    Claim(
        name="removal-impairs-learning",
        paper="residual",
        source="Figure 1b",
        statement="Removing residual connections impairs generalization.",
        test="test accuracy, skips of the first layer removed in training, minus untouched",
        relation="<=",
        threshold=-0.01,
        cells={"ViT": ("noisy:arms",)},
        value=lambda f: f["first_test_accuracy"] - f["whole_test_accuracy"],
        premises=(LEARNED, _memorized("whole", "first")),
        own=NOISE,
    ),
    Claim(
        name="early-removal-worse",
        paper="residual",
        source="abstract, section 5.1, Figure 2",
        statement="Training without the first layer's skips costs more than without the last's.",
        test="test accuracy, skips of the first layer removed minus of the last",
        relation="<=",
        threshold=-0.01,
        cells={"ViT": ("noisy:arms",)},
        value=lambda f: f["first_test_accuracy"] - f["last_test_accuracy"],
        premises=(LEARNED, _memorized("first", "last")),
        own=NOISE,
    ),
    Claim(
        name="memorization-gradient-smaller",
        paper="residual",
        source="section 4.5, Figures 5 and 15",
        statement="Memorization gradients are much smaller than learning gradients in all layers.",
        test="gradient norm of memorized over that of clean test samples, largest of the layers",
        relation="<=",
        threshold=1.0,
        cells={"ViT": ("noisy:arms",)},
        value=lambda f: float(f["gradient_ratio"].max()),
        own=NOISE,
        premises=(_memorized("whole"),),
        worst=True,
    ),
    Claim(
        name="statistics-consistent",
        paper="residual",
        source="section 4.6, Figures 6 and 16 to 22",
        statement="Activations vary alike on learning and on memorized samples.",
        test="largest relative difference over layers of the activations' standard deviation",
        relation="<=",
        threshold=0.1,
        cells={"ViT": ("noisy:arms",)},
        value=lambda f: f["std_apart"],
        own=NOISE,
        premises=(_memorized("whole"),),
        worst=True,
    ),
    Claim(
        name="early-residuals-matter-most",
        paper="residual",
        source="abstract, section 5.1, Figure 2",
        statement="Residual connections of early layers matter most.",
        test="accuracy after removing one layer's skips of the trained network (the paper removes "
        "them in training), first third minus last third of layers",
        relation="<=",
        threshold=-0.01,
        cells=CLASSIFIERS,
        value=lambda f: _early_against_late(f["removed_accuracy"]),
        needs=("trace", "ablate"),
        premises=(LEARNED,),
    ),
    Claim(
        name="early-margins-fall-most",
        paper="residual",
        source="section 5.2, Figures 8 and 23",
        statement="Removing early residual connections reduces the output margin most.",
        test="margin after removal from the trained network over the whole margin, first third "
        "minus last third of layers",
        relation="<=",
        threshold=-0.01,
        cells=CLASSIFIERS,
        value=lambda f: _early_against_late(f["removed_margin"] / f["whole_margin"]),
        needs=("trace", "ablate"),
        premises=(LEARNED,),
    ),
    Claim(
        name="early-gradients-larger",
        paper="residual",
        source="section 5.2, Figures 5 and 25",
        statement="Early layers have the larger gradient norms.",
        test="rank correlation of the per-sample gradient norm with the depth (0..L-1)",
        relation="<=",
        threshold=-0.8,
        cells=TRANSFORMER,
        value=lambda f: by_layer(f["gradient_norm"][:-1]),
        premises=(LEARNED,),
    ),
    Claim(
        name="gradients-tell-importance",
        paper="residual",
        source="section 5.2, Figures 9 and 24",
        statement="Layers with larger gradients lose more accuracy when their skips go.",
        test="rank correlation over layers of gradient norm and accuracy after removal from the "
        "trained network",
        relation="<=",
        threshold=-0.5,
        cells=TRANSFORMER,
        value=lambda f: spearman(f["gradient_norm"][:-1], f["removed_accuracy"]),
        needs=("trace", "ablate"),
        premises=(LEARNED,),
    ),
    Claim(
        name="bound-ordered",
        paper="residual",
        source="Theorem 2",
        statement="The upper bound on the gradient never rises from a layer to the next.",
        test="share of batches in which it holds for every sample",
        relation=">=",
        threshold=1.0,
        cells=TRANSFORMER,
        value=lambda f: f["bound_ordered"],
        needs=("bound",),
        worst=True,
    ),
    *(
        Claim(
            name=f"bound-holds-{form.replace('_', '-')}",
            paper="residual",
            source=f"Theorem 1, {words}",
            statement=f"The gradient norm stays below the upper bound, {words}.",
            test="share of samples and layers, at x and at x~, whose gradient norm exceeds it",
            relation="<=",
            threshold=0.0,
            cells=TRANSFORMER,
            value=partial(lambda form, f: f[f"bound_broken_{form}"], form),
            worst=True,
            needs=("bound",),
        )
        for form, words in (
            ("as_printed", "Eq. 17 as printed"),
            ("corrected", "its factors in the order of the paper's definitions"),
        )
    ),
)
