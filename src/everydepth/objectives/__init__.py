"""Objectives: a weight per depth and step, plus an optional regularizer."""

from everydepth.objectives.factories import (
    aligned,
    cosine_regularized,
    end_to_end,
    layerskip,
    lpa,
    multi_classifier,
    weighted,
)
from everydepth.objectives.objective import Objective

__all__ = [
    "Objective",
    "aligned",
    "cosine_regularized",
    "end_to_end",
    "layerskip",
    "lpa",
    "multi_classifier",
    "weighted",
]
