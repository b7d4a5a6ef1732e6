"""One number a depth that says how good its predictions are, for every task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from everydepth.stream import ResidualStream, States, Targets, has_labels, nothing_asked
from everydepth.stream.states import are_finite
from everydepth.stream.words import row_blocks, word_statistics


class Totals:
    """Sums over batches of a loss a depth, and the number of things summed.

    metric: "accuracy" (or "agreement" with the full model, if there are no labels) for classes,
    "perplexity" for tokens, "mse" for numbers, and "error" otherwise: the distance from the full
    model's prediction over that prediction's norm.
    """

    def __init__(self, metric: str, depth: int) -> None:
        self.metric = metric
        self.sums = torch.zeros(depth, dtype=torch.float64)
        self.count = self.samples = 0

    def quality(self, depth: int) -> float:
        if self.count == 0:
            raise nothing_asked()
        mean = float(self.sums[depth - 1] / self.count)
        return float(torch.tensor(mean).exp()) if self.metric == "perplexity" else mean


def quality_of(stream: ResidualStream, batch: Mapping[str, Any]) -> Totals:
    """Empty totals of the metric that fits the task and the batch."""
    labelled = has_labels(stream, batch)
    if stream.task == "classification":
        metric = "accuracy" if labelled else "agreement"
    elif labelled and stream.task in ("causal_lm", "masked_lm"):
        metric = "perplexity"
    elif labelled and stream.task == "regression":
        metric = "mse"
    else:
        metric = "error"
    return Totals(metric, stream.depth)


def watch(totals: Totals, states: States, depths: Sequence[int]) -> None:
    """Add one batch, at these depths."""
    stream, batch = states.stream, states.batch
    if totals.metric == "perplexity" and states.output is None:
        targets = Targets.of(stream, batch, weighted=False)
        found = _losses(targets, states, depths)
    else:
        last = states.logits(stream.depth)
        if totals.metric in ("agreement", "error"):
            targets = Targets.every(stream, batch, last)
        else:
            targets = Targets.of(stream, batch, weighted=False)
        last = targets.pick(last)
        found = [
            _values(totals.metric, targets, targets.predicted(states, depth), last)
            for depth in depths
        ]
    totals.samples += targets.samples
    totals.count += found[0].numel()
    for depth, values in zip(depths, found, strict=True):
        totals.sums[depth - 1] += values.double().sum().cpu()
    if not bool(torch.isfinite(totals.sums).all()):
        states.check_predictions()


def _losses(targets: Targets, states: States, depths: Sequence[int]) -> list[Tensor]:
    """Cross-entropies of a large vocabulary, in one pass over the head."""
    inputs = [targets.head_inputs(states, depth) for depth in depths]
    blocks = [
        torch.stack([x[rows] for x in inputs]) for rows in row_blocks(len(targets), len(depths))
    ]
    head = states.stream.linear_head("a sweep over words")
    found = word_statistics(blocks, head.weight, head.bias, targets.labels, ["loss"])
    return list(found["loss"])


def _values(metric: str, targets: Targets, z: Tensor, last: Tensor) -> Tensor:
    """One a row; NaN where the prediction is no prediction."""
    if metric in ("accuracy", "agreement"):
        right = targets.hits(z) if metric == "accuracy" else z.argmax(-1) == last.argmax(-1)
        return right.float().masked_fill(~are_finite(z), torch.nan)
    if metric == "error":
        gap, whole = (
            targets.sample_sums(x.flatten(1).square().sum(1)).sqrt() for x in (z - last, last)
        )
        return gap / whole.clamp_min(torch.finfo(last.dtype).tiny)
    return targets.losses(z)
