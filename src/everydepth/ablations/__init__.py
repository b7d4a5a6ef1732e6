"""Ablations: scaled skips, memorised labels, gradients of both, labels that are likely wrong."""

from everydepth.ablations.audit import Audit, audit, folds
from everydepth.ablations.bound import Widths, is_ordered, upper_bound, weight_widths
from everydepth.ablations.memorize import Memorization, memorization
from everydepth.ablations.prompts import label_prompts
from everydepth.ablations.result import Ablation, interval
from everydepth.ablations.skips import ScaledSkip, scaled_skip
from everydepth.ablations.study import (
    GradientStudy,
    UnifiedView,
    gradient_study,
    spearman,
    unified_view,
)
from everydepth.ablations.sweep import ablate
from everydepth.ablations.taps import Taps, tapped
from everydepth.ablations.watch import GradientWatch

__all__ = [
    "Ablation",
    "Audit",
    "GradientStudy",
    "GradientWatch",
    "Memorization",
    "ScaledSkip",
    "Taps",
    "UnifiedView",
    "Widths",
    "ablate",
    "audit",
    "folds",
    "gradient_study",
    "interval",
    "is_ordered",
    "label_prompts",
    "memorization",
    "scaled_skip",
    "spearman",
    "tapped",
    "unified_view",
    "upper_bound",
    "weight_widths",
]
