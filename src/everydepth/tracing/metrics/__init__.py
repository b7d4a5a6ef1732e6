"""The built-in metrics, one file per group; importing this package registers them."""

from everydepth.tracing.metrics import cka as cka
from everydepth.tracing.metrics import contributions as contributions
from everydepth.tracing.metrics import decisions as decisions
from everydepth.tracing.metrics import detection as detection
from everydepth.tracing.metrics import gradients as gradients
from everydepth.tracing.metrics import predictive as predictive
from everydepth.tracing.metrics import similarity as similarity
from everydepth.tracing.metrics import statistics as statistics
from everydepth.tracing.metrics import structure as structure
