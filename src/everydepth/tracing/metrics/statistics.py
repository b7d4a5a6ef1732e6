"""Standard deviations of the stream and of the weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everydepth.results.result import Result
from everydepth.stream import at_least_float32, real_tokens
from everydepth.stream.maps import weight_spread
from everydepth.tracing.metric import BatchMetric, register_metric
from everydepth.tracing.metrics.contributions import by_branch
from everydepth.tracing.observation import BlockRecords, Observation


@dataclass(frozen=True)
class _Moments:
    """Count, mean and sum of squared deviations, which merge without cancellation."""

    n: int
    mean: float
    m2: float

    @classmethod
    def of(cls, values: Tensor) -> _Moments:
        x = at_least_float32(values)
        n, mean = x.numel(), float(x.mean())
        # Row norms summed in float64 are precise, and twenty times faster than torch.var.
        squares = _squares(x) - n * mean**2
        if squares < n * mean**2:  # most digits canceled: center first
            squares = _squares(x - mean)
        return cls(n, mean, squares)

    def __add__(self, other: _Moments) -> _Moments:
        delta, n = other.mean - self.mean, self.n + other.n
        spread = self.m2 + other.m2 + delta**2 * self.n * other.n / n
        return _Moments(n, self.mean + delta * other.n / n, spread)

    @property
    def std(self) -> float:
        return (self.m2 / self.n) ** 0.5


def _squares(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dim=-1).double().square().sum())


@register_metric
class StreamStd(BatchMetric):
    """Standard deviation of the stream at the input of each branch of block l, without padding.

    With attention and MLP branches, `attention` is the std of `x_l` and `mlp` that of `x~_l`.
    """

    name = "stream_std"
    title = "Spread of the stream"
    about = "Standard deviation of the stream at the input of each branch."
    section = "gradients"
    group = "statistics"
    needs = frozenset({"branches"})

    def __init__(self) -> None:
        self.moments: dict[tuple[str, int], _Moments] = {}
        self.batch: dict[tuple[str, int], _Moments] = {}
        self.depth = 0

    def see_block(self, seen: BlockRecords) -> None:
        for name, record in zip(seen.block.names, seen.branches, strict=True):
            x = record.x.detach()
            real = real_tokens(seen.stream, seen.batch, tuple(record.shape[:2]), x.device)
            if len(record.shape) == 3 and real is not None and not bool(real.all()):
                x = x.reshape(record.shape)[real]
            self.batch[name, seen.depth] = _Moments.of(x)

    def update(self, observation: Observation) -> None:
        self.depth = observation.depth
        for key, found in self.batch.items():
            self.moments[key] = self.moments[key] + found if key in self.moments else found
        self.batch = {}

    def compute(self) -> Result:
        stds = {key: found.std for key, found in self.moments.items()}
        columns = by_branch(stds, range(1, self.depth + 1))
        labels = {n: f"where {n.replace('_', ' ')} reads: std of the stream" for n in columns}
        return self.over_depths(columns, first=1, labels=labels)


@register_metric
class WeightStd(BatchMetric):
    """Standard deviation of every weight matrix of each block, by name."""

    name = "weight_std"
    title = "Spread of the weights"
    about = "Standard deviation of each weight matrix."
    section = "gradients"
    group = "statistics"

    def __init__(self) -> None:
        self.columns: dict[str, np.ndarray] = {}

    def update(self, observation: Observation) -> None:
        if not self.columns:
            spread = weight_spread(observation.stream.blocks)
            # Without dots, so that they can be names of arrays.
            self.columns = {name.replace(".", "_"): stds for name, stds in spread.items()}

    def compute(self) -> Result:
        if not self.columns:
            return self.gap("the blocks have no weight matrices")
        labels = {name: f"{name.replace('_', ' ')}: std of the weights" for name in self.columns}
        return self.over_depths(self.columns, first=1, labels=labels)
