"""Tracing: one pass over the data, every depth measured."""

from everydepth.results.result import Kind, Result, gap
from everydepth.tracing import metrics as _metrics  # registers the built-in metrics
from everydepth.tracing.language import diversity, sentence_encoder, text_at_depth, token_grid
from everydepth.tracing.metric import (
    BatchMetric,
    FeatureMetric,
    Metric,
    groups,
    metric_names,
    register_metric,
)
from everydepth.tracing.metrics.decisions import effective_depth
from everydepth.tracing.metrics.gradients import gradient_alignment
from everydepth.tracing.observation import BlockRecords, FeatureRows, Observation
from everydepth.tracing.probes import linear_probe
from everydepth.tracing.record import Trace
from everydepth.tracing.run import trace

__all__ = [
    "BatchMetric",
    "BlockRecords",
    "FeatureMetric",
    "FeatureRows",
    "Kind",
    "Metric",
    "Observation",
    "Result",
    "Trace",
    "diversity",
    "effective_depth",
    "gap",
    "gradient_alignment",
    "groups",
    "linear_probe",
    "metric_names",
    "register_metric",
    "sentence_encoder",
    "text_at_depth",
    "token_grid",
    "trace",
]

del _metrics
