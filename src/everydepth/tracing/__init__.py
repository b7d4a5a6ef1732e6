"""Tracing: one pass over the data, every depth measured."""

from everydepth.results.result import Kind as Kind
from everydepth.results.result import Result as Result
from everydepth.results.result import gap as gap
from everydepth.tracing.language import diversity as diversity
from everydepth.tracing.language import sentence_encoder as sentence_encoder
from everydepth.tracing.language import text_at_depth as text_at_depth
from everydepth.tracing.language import token_grid as token_grid
from everydepth.tracing.metric import BatchMetric as BatchMetric
from everydepth.tracing.metric import FeatureMetric as FeatureMetric
from everydepth.tracing.metric import Metric as Metric
from everydepth.tracing.metric import groups as groups
from everydepth.tracing.metric import metric_names as metric_names
from everydepth.tracing.metric import register_metric as register_metric
from everydepth.tracing.metrics.decisions import effective_depth as effective_depth
from everydepth.tracing.metrics.gradients import gradient_alignment as gradient_alignment
from everydepth.tracing.observation import BlockRecords as BlockRecords
from everydepth.tracing.observation import FeatureRows as FeatureRows
from everydepth.tracing.observation import Observation as Observation
from everydepth.tracing.probes import linear_probe as linear_probe
from everydepth.tracing.record import Trace as Trace
from everydepth.tracing.run import trace as trace
