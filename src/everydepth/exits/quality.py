"""The quality of predictions at each depth, as one number, for every task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from everydepth.stream import ResidualStream, States, Targets, has_labels, no_labels
from everydepth.stream.states import are_finite
from everydepth.stream.words import row_blocks, word_statistics


class Totals:
    """Sums of a metric over batches, one per depth, and the number of values.

    metric: "accuracy" for classes (without labels, "agreement" with the full model), "perplexity"
    for tokens, "mse" for numbers, and otherwise "error": the distance from the full model's
    prediction, relative to its norm.
    """

    def __init__(self, metric: str, depth: int) -> None:
        self.metric = metric
        self.sums = torch.zeros(depth, dtype=torch.float64)
        self.count = self.samples = 0

    def quality(self, depth: int) -> float:
        if self.count == 0:
            raise no_labels()
        mean = float(self.sums[depth - 1] / self.count)
        return float(torch.tensor(mean).exp()) if self.metric == "perplexity" else mean


def quality_of(stream: ResidualStream, batch: Mapping[str, Any]) -> Totals:
    """Empty totals with the metric that fits the task and the batch."""
    labeled = has_labels(stream, batch)
    if stream.task == "classification":
        metric = "accuracy" if labeled else "agreement"
    elif labeled and stream.task in ("causal_lm", "masked_lm"):
        metric = "perplexity"
    elif labeled and stream.task == "regression":
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
        targets = _targets(totals.metric, stream, batch, last)
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


def watch_given(
    totals: Totals,
    stream: ResidualStream,
    batch: Mapping[str, Any],
    found: Sequence[Tensor],
    last: Tensor,
) -> None:
    """Add one batch whose logits at every depth were computed elsewhere.

    last: the full model's logits, to compare with if there are no labels.
    """
    targets = _targets(totals.metric, stream, batch, last)
    picked = targets.pick(last)
    values = [_values(totals.metric, targets, targets.pick(logits), picked) for logits in found]
    totals.samples += targets.samples
    totals.count += values[0].numel()
    totals.sums += torch.stack([depth.double().sum().cpu() for depth in values])


def _targets(
    metric: str, stream: ResidualStream, batch: Mapping[str, Any], last: Tensor
) -> Targets:
    if metric in ("agreement", "error"):
        return Targets.every(stream, batch, last)
    return Targets.of(stream, batch, weighted=False)


def _losses(targets: Targets, states: States, depths: Sequence[int]) -> list[Tensor]:
    """Cross-entropies with a large vocabulary, in one pass over the head."""
    inputs = [targets.head_inputs(states, depth) for depth in depths]
    blocks = [
        torch.stack([x[rows] for x in inputs]) for rows in row_blocks(len(targets), len(depths))
    ]
    head = states.stream.linear_head("a sweep over words")
    found = word_statistics(blocks, head.weight, head.bias, targets.labels, ["loss"])
    return list(found["loss"])


def _values(metric: str, targets: Targets, z: Tensor, last: Tensor) -> Tensor:
    """One value per row; NaN if the prediction is not finite."""
    if metric in ("accuracy", "agreement"):
        right = targets.hits(z) if metric == "accuracy" else z.argmax(-1) == last.argmax(-1)
        return right.float().masked_fill(~are_finite(z), torch.nan)
    if metric == "error":
        gap, whole = (
            targets.sample_sums(x.flatten(1).square().sum(1)).sqrt() for x in (z - last, last)
        )
        return gap / whole.clamp_min(torch.finfo(last.dtype).tiny)
    return targets.losses(z)
