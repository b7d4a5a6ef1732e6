"""Tracing: one pass over the data, every depth measured (SPEC 1.1, 1.2, 1.6, 2, 3.3-3.6)."""

from everydepth.tracing import metrics as _metrics  # registers the built-in metrics
from everydepth.tracing.metric import (
    BatchMetric,
    FeatureMetric,
    Metric,
    groups,
    metric_names,
    register_metric,
)
from everydepth.tracing.observation import FeatureRows, Observation
from everydepth.tracing.record import Trace
from everydepth.tracing.result import Kind, Result, gap
from everydepth.tracing.run import trace

__all__ = [
    "BatchMetric",
    "FeatureMetric",
    "FeatureRows",
    "Kind",
    "Metric",
    "Observation",
    "Result",
    "Trace",
    "gap",
    "groups",
    "metric_names",
    "register_metric",
    "trace",
]

del _metrics
