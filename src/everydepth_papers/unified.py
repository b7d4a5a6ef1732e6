"""Gradients, margins and accuracy of every layer side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from everydepth.ablations import Ablation, GradientStudy
from everydepth.ablations.result import Floats
from everydepth.config import checked
from everydepth.errors import SettingError
from everydepth.results import Result, Results, curve, defined, named, provenance, scalars
from everydepth_papers.statistics import spearman


class UnifiedView(Results, kind="unified_view"):
    """Per layer: gradient norm of learning, and margin and accuracy without the layer's skips."""

    @property
    def spearman(self) -> dict[str, float]:
        """The rank correlation over layers of each pair of these three; NaN if one is constant."""
        return {name: float(value) for name, value in self.result("spearman").arrays.items()}


@checked
def unified_view(study: GradientStudy, ablation: Ablation) -> UnifiedView:
    """Gradients, margins and accuracy of every layer side by side. The ablation needs c = 0.

    >>> study = ed.gradient_study(model, valid, noisy, flipped=noise, progress=False)
    >>> ablation = ed.ablate(model, valid, c=(0.0, 1.0), progress=False)
    >>> from everydepth_papers.unified import unified_view
    >>> sorted(unified_view(study, ablation).spearman)
    ['gradient_norm/accuracy', 'gradient_norm/margin', 'margin/accuracy']
    """
    if ablation.layers != study.layers:
        raise SettingError(
            f"the ablation has layers {ablation.layers} and the study {study.layers}; "
            "ablate all layers of the same model"
        )
    values = {
        "gradient_norm": study.learning.norm,
        "margin": ablation.at("margin", 0.0),
        "accuracy": ablation.at("accuracy", 0.0),
    }
    curves = [
        curve(name, study.layers, value, axis="layer", section="gradients", about=about)
        for (name, value), about in zip(values.items(), _VIEWED, strict=True)
    ]
    ranks = scalars(
        "spearman",
        {f"{a}/{b}": spearman(values[a], values[b]) for a, b in combinations(values, 2)},
        title="Do the three rank the layers alike?",
        about="Rank correlations over layers.",
        section="gradients",
    )
    about = provenance(model=study.model, depth=study.depth, samples=study.samples)
    against = [_against(what, values, study.layers) for what in ("margin", "accuracy")]
    return UnifiedView(results=named(*against, *curves, ranks), about=about)


def _against(what: str, values: Mapping[str, Floats], layers: Sequence[int]) -> Result:
    return Result(
        name=f"{what}_against_gradient",
        kind="scatter",
        axis="gradient_norm",
        series=(what,),
        arrays={
            "gradient_norm": values["gradient_norm"],
            what: defined(values[what]),
            "text": np.array([f"layer {n}" for n in layers]),
        },
        labels={"gradient_norm": "gradient norm of learning", what: f"{what} without the skips"},
        title=f"Gradient and {what} of each layer",
        about="Removing the skips of layers with large gradients should hurt most.",
        section="blocks",
    )


_VIEWED = (
    "Gradient norm of clean test samples.",
    "Top-1 minus top-2 logit without the skips of this layer.",
    "Accuracy without the skips of this layer.",
)
