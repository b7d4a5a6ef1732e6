"""What a cell keeps of the library's results: the numbers that the verdicts read, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from everydepth.ablations import Ablation, GradientStudy, Memorization
from everydepth.ablations.study import Side
from everydepth.config import plain
from everydepth_papers.bound import Bounded
from everydepth_papers.unified import UnifiedView


def ablation_record(found: Ablation) -> dict[str, Any]:
    """Layers and scales, and every metric by seed, layer and scale."""
    return plain(
        {
            "model": found.model,
            "task": found.task,
            "mode": found.mode,
            "which": found.which,
            "layers": found.layers,
            "c": found.c,
            "seeds": found.seeds,
            "samples": found.samples,
            "runs": found.runs,
            "untouched": found.untouched,
        }
    )


def memorization_record(found: Memorization) -> dict[str, Any]:
    """The shares, with their intervals, and memorization by depth."""
    return plain(
        {
            "memorization": found.memorization,
            "interval": found.interval,
            "recovered": found.recovered,
            "train_accuracy": found.train_accuracy,
            "reached": found.reached,
            "test_accuracy": found.test_accuracy,
            "test_interval": found.test_interval,
            "flipped": found.flipped,
            "samples": found.samples,
            **{name: found[name] for name in found if name.endswith("by_depth")},
        }
    )


def study_record(found: GradientStudy, bound: Bounded | str) -> dict[str, Any]:
    """Means over samples. bound: of the clean samples, or why there is none."""
    known = None if isinstance(bound, str) else bound
    return plain(
        {
            "model": found.model,
            "layers": found.layers,
            "note": bound if isinstance(bound, str) else None,
            "weights": found.weights,
            "bound_is_ordered": None if known is None else known.is_ordered,
            "learning": {**_side(found.learning), **_bounds(known)},
            "memorization": _side(found.memorization),
        }
    )


def view_record(found: UnifiedView) -> dict[str, Any]:
    """The three measurements per layer, and how they rank the layers."""
    names = ("gradient_norm", "margin", "accuracy")
    return plain({**{name: found[name] for name in names}, "spearman": found.spearman})


def _bounds(bound: Bounded | None) -> dict[str, Any]:
    known = {} if bound is None else bound.bounds
    return {
        "log10_bound": {form: _means(found) for form, found in known.items()},
        "violations": {} if bound is None else {form: bound.violations(form) for form in known},
    }


def _means(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value.mean(1) for name, value in values.items()}


def _side(side: Side) -> dict[str, Any]:
    return {
        "samples": len(side.error),
        "norm": side.norm,
        "norms": _means(side.norms),
        "std": _means(side.std),
        "error": float(side.error.mean()),
        "loss": float(side.loss.mean()),
        "margin": float(side.margin.mean()),
    }
