"""Training: the module that supervises every depth, and the loop around it."""

from everydepth.training.checks import ObjectiveReport, check_objective
from everydepth.training.module import EveryDepth, EveryDepthOutput

__all__ = ["EveryDepth", "EveryDepthOutput", "ObjectiveReport", "check_objective"]
