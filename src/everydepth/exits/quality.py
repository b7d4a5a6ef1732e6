"""The quality of predictions at each depth, as one number, for every task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from everydepth.stream import WORD_TASKS, ResidualStream, States, Targets, has_labels, no_labels
from everydepth.stream.states import are_finite
from everydepth.stream.words import row_blocks, word_statistics

FEWEST = 16  # tokens to draw from a batch; fewer say little about how depths are related


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
        # Over tokens drawn for the depths below the last: sums of y, y^2, xy, x and x^2, where y
        # is the loss of a depth and x that of the last.
        self.moments = torch.zeros(5, depth, dtype=torch.float64)
        self.drawn = 0

    def quality(self, depth: int) -> float:
        mean = self._mean(depth)[0]
        return _exp(mean) if self.metric == "perplexity" else mean

    def band(self, depth: int) -> tuple[float, float]:
        """The perplexity one standard error (of drawing tokens) below and above."""
        mean, error = self._mean(depth)
        return _exp(mean - error), _exp(mean + error)

    def _mean(self, depth: int) -> tuple[float, float]:
        """The mean over all tokens, and its standard error.

        The loss of the last depth is known at every token, so the mean of another depth is
        estimated by regression on it. If the two are unrelated, as in early blocks, the result is
        the mean of the drawn tokens; if they are similar, little is left to chance.
        """
        if self.count == 0:
            raise no_labels()
        known = float(self.sums[depth - 1] / self.count)
        if not self.drawn or depth == len(self.sums):
            return known, 0.0
        y, yy, xy, x, xx = (self.moments[:, depth - 1] / self.drawn).tolist()
        spread, common, variance = yy - y * y, xy - x * y, xx - x * x
        slope = common / variance if variance > 0 else 0.0
        rest = max(spread - slope * common, 0.0) * max(1 - self.drawn / self.count, 0.0)
        last = float(self.sums[-1] / self.count)
        return y + slope * (last - x), math.sqrt(rest / max(self.drawn - 2, 1))


def _exp(value: float) -> float:
    return float(torch.tensor(value).exp())


def quality_of(stream: ResidualStream, batch: Mapping[str, Any]) -> Totals:
    """Empty totals with the metric that fits the task and the batch."""
    labeled = has_labels(stream, batch)
    if stream.task in ("classification", "token_classification"):
        metric = "accuracy" if labeled else "agreement"
    elif labeled and stream.task in WORD_TASKS:
        metric = "perplexity"
    elif labeled and stream.task == "regression":
        metric = "mse"
    else:
        metric = "error"
    return Totals(metric, stream.depth)


def affordable_share(stream: ResidualStream, depths: int) -> float:
    """The fraction of tokens at which reading out all depths costs no more than the blocks."""
    return min(1.0, 1 / (depths * readout_cost(stream)))


def readout_cost(stream: ResidualStream) -> float:
    """What predicting a word takes, relative to all blocks, by the number of weights."""
    weights = sum(p.numel() for block in stream.blocks for p in block.module.parameters())
    return stream.linear_head("a readout").weight.numel() / max(weights, 1)


def watch(
    totals: Totals, states: States, depths: Sequence[int], share: float | None = None
) -> None:
    """Add one batch, at these depths.

    share: the fraction of tokens at which depths below the last are read, if the vocabulary is
        processed in parts; None: all.
    """
    stream, batch = states.stream, states.batch
    if totals.metric == "perplexity" and states.output is None:
        targets = Targets.of(stream, batch, weighted=False)
        if share is not None and share < 1 and len(targets) > 1:
            _add_drawn(totals, targets, states, depths, share)
            return
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


def _add_drawn(
    totals: Totals, targets: Targets, states: States, depths: Sequence[int], share: float
) -> None:
    """Add the last depth at every token, and the others at some."""
    [last] = _losses(targets, states, [states.depth])
    count = min(max(FEWEST, round(share * len(targets))), len(targets))
    random = torch.Generator().manual_seed(totals.samples)  # other places in every batch
    rows = torch.randperm(len(targets), generator=random)[:count].to(last.device)
    inner = [depth for depth in depths if depth < states.depth]
    totals.samples += targets.samples
    totals.count += len(targets)
    totals.drawn += count
    totals.sums[-1] += last.double().sum().cpu()
    x = last[rows].double()
    for depth, found in zip(inner, _losses(targets, states, inner, rows), strict=True):
        y = found.double()
        moments = torch.stack([y, y * y, x * y, x, x * x]).sum(1)
        totals.moments[:, depth - 1] += moments.cpu()
    if not bool(torch.isfinite(totals.moments).all() & torch.isfinite(totals.sums[-1])):
        states.check_predictions()


def _losses(
    targets: Targets, states: States, depths: Sequence[int], rows: Tensor | None = None
) -> list[Tensor]:
    """Cross-entropies with a large vocabulary, in one pass over the head. rows: only these."""
    if not depths:
        return []
    inputs = [targets.head_inputs(states, depth) for depth in depths]
    labels = targets.labels
    if rows is not None:
        inputs, labels = [x[rows] for x in inputs], labels[rows]
    blocks = [
        torch.stack([x[part] for x in inputs]) for part in row_blocks(len(labels), len(depths))
    ]
    head = states.stream.linear_head("a sweep over words")
    found = word_statistics(blocks, head.weight, head.bias, labels, ["loss"])
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
