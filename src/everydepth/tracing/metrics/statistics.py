"""Spread of the stream and of the weights (SPEC 3.4)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from everydepth.tracing.metric import BatchMetric, register_metric
from everydepth.tracing.metrics.contributions import branch_names
from everydepth.tracing.metrics.shared import DEPTH, depths
from everydepth.tracing.observation import Observation, real_tokens
from everydepth.tracing.result import Result, defined, gap


class _Moments:
    """Count, mean and sum of squared deviations; parts are merged, so a large mean does no harm."""

    def __init__(self) -> None:
        self.n, self.mean, self.m2 = 0, 0.0, 0.0

    def add(self, values: Tensor) -> None:
        x = values if values.dtype == torch.float64 else values.float()
        n, mean = x.numel(), float(x.mean())
        # Row norms summed in float64 keep the digits; torch.var is twenty times slower.
        squares = _squares(x) - n * mean**2
        if squares < n * mean**2:  # most digits cancelled: centre first
            squares = _squares(x - mean)
        delta, total = mean - self.mean, self.n + n
        self.m2 += squares + delta**2 * self.n * n / total
        self.mean += delta * n / total
        self.n = total

    @property
    def std(self) -> float:
        return (self.m2 / self.n) ** 0.5


def _squares(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dim=-1).double().square().sum())


@register_metric
class StreamStd(BatchMetric):
    """Standard deviation of the entries of the stream where each branch of block l reads it.

    With attention and MLP branches, `attention` is the std of `x_l` and `mlp` that of `x~_l`.
    Padding is left out.
    """

    name = "stream_std"
    group = "statistics"
    needs = frozenset({"branches"})

    def __init__(self) -> None:
        self.moments: dict[tuple[str, int], _Moments] = {}
        self.depth = 0

    def update(self, observation: Observation) -> None:
        records = observation.branches
        assert records is not None
        self.depth = observation.depth
        h = observation.states.h[0]
        mask = real_tokens(observation.states, h.shape[1]) if h.ndim == 3 else None
        everything = mask is None or bool(mask.all())
        for depth, (block, seen) in enumerate(
            zip(observation.stream.blocks, records, strict=True), start=1
        ):
            for name, record in zip(branch_names(block), seen, strict=True):
                x = record.x.detach()
                if not everything and mask is not None:
                    x = x.view(record.shape)
                    x = x[mask] if x.shape[:2] == mask.shape else x
                self.moments.setdefault((name, depth), _Moments()).add(x)

    def compute(self) -> Result:
        if not self.moments:
            return gap(self.name, "curve", "no data was seen")
        names = tuple(dict.fromkeys(name for name, _ in self.moments))
        where = depths(self.depth, 1)
        columns = {
            name: np.array(
                [self.moments[name, d].std if (name, d) in self.moments else np.nan for d in where]
            )
            for name in names
        }
        return Result(
            name=self.name,
            kind="curve",
            series=names,
            arrays={"depth": where, **{n: defined(c) for n, c in columns.items()}},
            labels={
                "depth": DEPTH,
                **{n: f"where {n.replace('_', ' ')} reads: std of the stream" for n in names},
            },
        )


@register_metric
class WeightStd(BatchMetric):
    """Standard deviation of every weight matrix of each block, by its name inside the block."""

    name = "weight_std"
    group = "statistics"

    def __init__(self) -> None:
        self.columns: dict[str, np.ndarray] = {}

    def update(self, observation: Observation) -> None:
        if self.columns:
            return
        blocks = observation.stream.blocks
        for i, block in enumerate(blocks):
            for name, std in _weights(block.module):
                column = self.columns.setdefault(name, np.full(len(blocks), np.nan))
                column[i] = std

    def compute(self) -> Result:
        if not self.columns:
            return gap(self.name, "curve", "the blocks have no weight matrices")
        last = len(next(iter(self.columns.values())))
        return Result(
            name=self.name,
            kind="curve",
            series=tuple(self.columns),
            arrays={
                "depth": depths(last, 1),
                **{name: defined(column) for name, column in self.columns.items()},
            },
            labels={
                "depth": DEPTH,
                **{name: f"{name.replace('_', ' ')}: std of the weights" for name in self.columns},
            },
        )


def _weights(module: nn.Module) -> list[tuple[str, float]]:
    """Names with dots replaced, so that they can name arrays."""
    return [
        (
            name.removesuffix(".weight").replace(".", "_"),
            float(parameter.detach().float().std(correction=0)),
        )
        for name, parameter in module.named_parameters()
        if parameter.ndim >= 2
    ]
