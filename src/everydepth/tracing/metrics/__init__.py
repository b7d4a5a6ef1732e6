"""The built-in metrics, one file a group; importing this package registers them."""

from everydepth.tracing.metrics import predictive as predictive
from everydepth.tracing.metrics import similarity as similarity
