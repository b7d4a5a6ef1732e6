"""everydepth: a residual network you can use, understand, shrink and grow at every depth."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everydepth import growth as growth
    from everydepth.ablations import Ablation as Ablation
    from everydepth.ablations import Audit as Audit
    from everydepth.ablations import GradientStudy as GradientStudy
    from everydepth.ablations import GradientWatch as GradientWatch
    from everydepth.ablations import Memorization as Memorization
    from everydepth.ablations import ablate as ablate
    from everydepth.ablations import audit as audit
    from everydepth.ablations import gradient_study as gradient_study
    from everydepth.ablations import memorization as memorization
    from everydepth.ablations import scaled_skip as scaled_skip
    from everydepth.ablations import unified_view as unified_view
    from everydepth.exits import Agreement as Agreement
    from everydepth.exits import Certificate as Certificate
    from everydepth.exits import Confidence as Confidence
    from everydepth.exits import Entropy as Entropy
    from everydepth.exits import Evaluation as Evaluation
    from everydepth.exits import Margin as Margin
    from everydepth.exits import Patience as Patience
    from everydepth.exits import Policy as Policy
    from everydepth.exits import Prediction as Prediction
    from everydepth.exits import Profile as Profile
    from everydepth.exits import calibrate as calibrate
    from everydepth.exits import evaluate as evaluate
    from everydepth.exits import export as export
    from everydepth.exits import load as load
    from everydepth.exits import predict as predict
    from everydepth.exits import profile as profile
    from everydepth.exits.generation import Generation as Generation
    from everydepth.exits.generation import generate as generate
    from everydepth.growth import grow as grow
    from everydepth.growth import scaling as scaling
    from everydepth.objectives import Objective as Objective
    from everydepth.objectives import aligned as aligned
    from everydepth.objectives import cosine_regularized as cosine_regularized
    from everydepth.objectives import end_to_end as end_to_end
    from everydepth.objectives import layerskip as layerskip
    from everydepth.objectives import lpa as lpa
    from everydepth.objectives import multi_classifier as multi_classifier
    from everydepth.objectives import weighted as weighted
    from everydepth.report import report as report
    from everydepth.results import Result as Result
    from everydepth.results import Results as Results
    from everydepth.runs import Run as Run
    from everydepth.runs.sweep import sweep as sweep
    from everydepth.stream import Block as Block
    from everydepth.stream import Branch as Branch
    from everydepth.stream import Cursor as Cursor
    from everydepth.stream import ResidualStream as ResidualStream
    from everydepth.stream import States as States
    from everydepth.stream import as_stream as as_stream
    from everydepth.stream import at_depth as at_depth
    from everydepth.stream import check_stream as check_stream
    from everydepth.stream import families as families
    from everydepth.stream import insert as insert
    from everydepth.stream import register as register
    from everydepth.tracing import Trace as Trace
    from everydepth.tracing import gradient_alignment as gradient_alignment
    from everydepth.tracing import linear_probe as linear_probe
    from everydepth.tracing import register_metric as register_metric
    from everydepth.tracing import text_at_depth as text_at_depth
    from everydepth.tracing import token_grid as token_grid
    from everydepth.tracing import trace as trace
    from everydepth.training import EveryDepth as EveryDepth
    from everydepth.training import FitResult as FitResult
    from everydepth.training import check_objective as check_objective
    from everydepth.training import fit as fit

__version__ = "0.1.0"

# Where each public name lives. Nothing is imported before it is used: `everydepth --help` and
# `import everydepth` need neither torch nor transformers.
_HOMES = {
    "Ablation": "everydepth.ablations",
    "Audit": "everydepth.ablations",
    "GradientStudy": "everydepth.ablations",
    "GradientWatch": "everydepth.ablations",
    "Memorization": "everydepth.ablations",
    "ablate": "everydepth.ablations",
    "audit": "everydepth.ablations",
    "gradient_study": "everydepth.ablations",
    "memorization": "everydepth.ablations",
    "scaled_skip": "everydepth.ablations",
    "unified_view": "everydepth.ablations",
    "Agreement": "everydepth.exits",
    "Certificate": "everydepth.exits",
    "Confidence": "everydepth.exits",
    "Entropy": "everydepth.exits",
    "Evaluation": "everydepth.exits",
    "Margin": "everydepth.exits",
    "Patience": "everydepth.exits",
    "Policy": "everydepth.exits",
    "Prediction": "everydepth.exits",
    "Profile": "everydepth.exits",
    "calibrate": "everydepth.exits",
    "evaluate": "everydepth.exits",
    "export": "everydepth.exits",
    "load": "everydepth.exits",
    "predict": "everydepth.exits",
    "profile": "everydepth.exits",
    "EveryDepth": "everydepth.training",
    "FitResult": "everydepth.training",
    "check_objective": "everydepth.training",
    "Generation": "everydepth.exits.generation",
    "generate": "everydepth.exits.generation",
    "Objective": "everydepth.objectives",
    "aligned": "everydepth.objectives",
    "cosine_regularized": "everydepth.objectives",
    "end_to_end": "everydepth.objectives",
    "layerskip": "everydepth.objectives",
    "lpa": "everydepth.objectives",
    "multi_classifier": "everydepth.objectives",
    "weighted": "everydepth.objectives",
    "Block": "everydepth.stream",
    "Branch": "everydepth.stream",
    "Cursor": "everydepth.stream",
    "ResidualStream": "everydepth.stream",
    "Result": "everydepth.results",
    "Results": "everydepth.results",
    "Run": "everydepth.runs",
    "States": "everydepth.stream",
    "as_stream": "everydepth.stream",
    "at_depth": "everydepth.stream",
    "check_stream": "everydepth.stream",
    "families": "everydepth.stream",
    "grow": "everydepth.growth",
    "growth": "everydepth.growth",
    "insert": "everydepth.stream",
    "scaling": "everydepth.growth",
    "sweep": "everydepth.runs.sweep",
    "fit": "everydepth.training",
    "register": "everydepth.stream",
    "Trace": "everydepth.tracing",
    "register_metric": "everydepth.tracing",
    "trace": "everydepth.tracing",
    "gradient_alignment": "everydepth.tracing",
    "linear_probe": "everydepth.tracing",
    "text_at_depth": "everydepth.tracing",
    "token_grid": "everydepth.tracing",
    "report": "everydepth.report",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'everydepth' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    value = home if _HOMES[name] == f"everydepth.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
