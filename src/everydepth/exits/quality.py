"""One number a depth that says how good its predictions are, for every task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from everydepth.stream import IGNORE_INDEX, ResidualStream, States


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
        mean = float(self.sums[depth - 1] / max(self.count, 1))
        return float(torch.tensor(mean).exp()) if self.metric == "perplexity" else mean


def quality_of(stream: ResidualStream, batch: Mapping[str, Any]) -> Totals:
    """Empty totals of the metric that fits the task and the batch."""
    labelled = isinstance(batch.get("labels"), Tensor)
    if stream.task == "classification":
        metric = "accuracy" if labelled else "agreement"
    elif stream.task == "causal_lm" or (stream.task == "masked_lm" and labelled):
        metric = "perplexity"
    elif stream.task == "regression" and labelled:
        metric = "mse"
    else:
        metric = "error"
    return Totals(metric, stream.depth)


def watch(totals: Totals, states: States) -> None:
    """Add one batch."""
    stream = states.stream
    targets = _targets(totals.metric, states)
    if totals.metric in ("accuracy", "perplexity"):
        stream.check_labels(targets)
    totals.samples += states[0].shape[0]
    last = states.logits(stream.depth)
    for depth in range(1, stream.depth + 1):
        values = _values(totals.metric, states.logits(depth), last, targets)
        totals.sums[depth - 1] += values.double().sum().cpu()
        if depth == 1:
            totals.count += values.numel()


def _targets(metric: str, states: States) -> Tensor:
    labels, stream = states.batch.get("labels"), states.stream
    if metric == "agreement":
        return states.logits(stream.depth).argmax(-1)
    if metric == "perplexity" and stream.task == "causal_lm":
        given = states.batch["input_ids"] if labels is None else labels
        mask = states.batch.get("attention_mask")
        given = given if mask is None else given.masked_fill(mask == 0, IGNORE_INDEX)
        # Position t predicts token t + 1.
        return F.pad(given[:, 1:], (0, 1), value=IGNORE_INDEX)
    return torch.empty(0) if labels is None or metric == "error" else labels


def _values(
    metric: str, logits: Float[Tensor, "rows ..."], last: Tensor, targets: Tensor
) -> Tensor:
    if metric == "error":
        gap = (logits - last).flatten(1).norm(dim=1)
        return gap / last.flatten(1).norm(dim=1).clamp_min(torch.finfo(last.dtype).tiny)
    if metric == "mse":
        return (logits - targets.reshape(logits.shape)).square()
    real = targets != IGNORE_INDEX
    if metric == "perplexity":
        return F.cross_entropy(logits[real].float(), targets[real], reduction="none")
    return logits[real].argmax(-1) == targets[real]
