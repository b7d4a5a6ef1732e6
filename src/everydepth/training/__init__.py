"""Training: the module that supervises every depth, and the loop around it."""

from everydepth.training.callbacks import Callback, UntilAccuracy
from everydepth.training.checks import ObjectiveReport, check_objective
from everydepth.training.fitting import fit
from everydepth.training.loop import Training
from everydepth.training.module import EveryDepth, EveryDepthOutput
from everydepth.training.result import FitResult
from everydepth.training.schedules import Constant, Cosine, MultiStep, OneCycle, Schedule, Warmup
from everydepth.training.settings import EarlyStopping

__all__ = [
    "Callback",
    "Constant",
    "Cosine",
    "EarlyStopping",
    "EveryDepth",
    "EveryDepthOutput",
    "FitResult",
    "MultiStep",
    "ObjectiveReport",
    "OneCycle",
    "Schedule",
    "Training",
    "UntilAccuracy",
    "Warmup",
    "check_objective",
    "fit",
]
