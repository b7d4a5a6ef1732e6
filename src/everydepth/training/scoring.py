"""Evaluate every depth in one pass over the data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from everydepth.errors import NonFiniteError
from everydepth.stream import WORD_TASKS, Targets, evaluating
from everydepth.stream.feed import Feed, Source, moved, size_for
from everydepth.stream.rows import pick_rows
from everydepth.training.module import EveryDepth

Scores = dict[str, tuple[float, ...]]
"""By metric, one value per depth."""


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """Sums over rows: loss and hits by depth, the total weight, and the number of labels."""

    loss: Tensor
    hits: Tensor
    amount: Tensor
    labels: Tensor


class Evaluator:
    """Evaluates a network on data, at the given depths or all from 1 on."""

    def __init__(
        self, data: Source, *, batch_size: int = 256, depths: Sequence[int] | None = None
    ) -> None:
        self.data, self.batch_size, self.depths = data, batch_size, depths

    def __call__(self, net: EveryDepth, called: nn.Module, accelerator: Accelerator) -> Scores:
        """The scores of `net`; `called` is the same module as prepared by the accelerator."""
        depths = tuple(self.depths or range(1, net.stream.depth + 1))
        scored = partial(_scored, depths=depths)
        sums: _Sums | None = None
        with torch.no_grad(), evaluating(net):
            for batch, counts in self._batches(net, accelerator):
                batch = moved(batch, accelerator.device)
                found: _Sums = called(measure=scored, **batch)
                sums = _added(sums, found, counts)
        assert sums is not None  # a feed without a batch is an error of its own
        total = _over_processes(sums, accelerator)
        scores = _scores(net.stream.task, total)
        # Infinity is the loss of a class that is ruled out; NaN is no prediction at all.
        by_depth = zip(depths, scores["loss"], strict=True)
        wrong = next((depth for depth, loss in by_depth if math.isnan(loss)), None)
        if wrong is not None:
            raise NonFiniteError(
                f"in evaluation, the loss is NaN at depth {wrong} of {net.stream.depth}; look for "
                "NaN in the inputs and labels of the validation data, and in what the network uses "
                "in evaluation only, such as running statistics",
                wrong,
            )
        return scores

    def _batches(
        self, net: EveryDepth, accelerator: Accelerator
    ) -> Iterator[tuple[Mapping[str, Any], bool]]:
        """Batches with this process's rows, and whether to count them.

        All processes run the same number of batches: a batch with fewer rows than processes is run
        by all, and counted by the first.
        """
        rank, processes = accelerator.process_index, accelerator.num_processes
        stream, size = net.stream, size_for(self.data, self.batch_size)
        for batch in Feed(self.data, stream, batch_size=size, again=True, move=False):
            rows = stream.rows(batch)
            if rows >= processes:
                yield pick_rows(batch, slice(rank, None, processes), rows), True
            else:
                yield batch, rank == 0


def _targets(net: EveryDepth, batch: Mapping[str, Any]) -> Targets:
    # No label smoothing, so that runs with and without it are comparable.
    return Targets.of(net.stream, batch, class_weights=net.class_weights, criterion=net.criterion)


def _scored(net: EveryDepth, batch: Mapping[str, Any], *, depths: Sequence[int]) -> _Sums:
    targets = _targets(net, batch)
    states = net.stream.observe(batch)
    losses: list[Tensor] = []
    hits: list[Tensor] = []
    for depth in depths:
        z = targets.predicted(states, depth, net.own_head(depth))
        rows = targets.losses(z, targets.extras(states, depth))
        losses.append((rows * targets.weights).sum().double())
        if targets.has_classes:
            hits.append(targets.hits(z).sum().double())
    total = targets.amount.double()
    return _Sums(
        loss=torch.stack(losses),
        hits=torch.stack(hits) if hits else total.new_zeros(0),
        amount=total,
        labels=total.new_tensor(len(targets)),
    )


def _added(sums: _Sums | None, found: _Sums, counts: bool) -> _Sums:
    factor = 1.0 if counts else 0.0
    parts = {name: value * factor for name, value in vars(found).items()}
    if sums is not None:
        parts = {name: value + parts[name] for name, value in vars(sums).items()}
    return _Sums(**parts)


def _over_processes(sums: _Sums, accelerator: Accelerator) -> _Sums:
    if accelerator.num_processes == 1:
        return sums
    summed = {name: cast(Tensor, accelerator.reduce(v)) for name, v in vars(sums).items()}
    return _Sums(**summed)


def _scores(task: str, sums: _Sums) -> Scores:
    losses = (sums.loss / sums.amount).tolist()
    scores: Scores = {"loss": tuple(losses)}
    if task == "regression":
        scores["mse"] = scores["loss"]
    if len(sums.hits):
        scores["accuracy"] = tuple((sums.hits / sums.labels).tolist())
    if task in WORD_TASKS:
        # A float64 overflows beyond e^709.
        scores["perplexity"] = tuple(math.exp(min(loss, 700.0)) for loss in losses)
    return scores
