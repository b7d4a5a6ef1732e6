"""The run directory: config, environment, metrics, checkpoints, results; atomic and versioned."""

from everydepth.runs.checkpoint import Checkpoint
from everydepth.runs.run import FORMAT, Run, changes

__all__ = ["FORMAT", "Checkpoint", "Run", "changes"]
