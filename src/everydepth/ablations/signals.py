"""Signals for `audit`: how the depths of a network judge a label."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from everydepth.ablations.result import Floats
from everydepth.errors import BatchError, LabelError
from everydepth.stream import ResidualStream, Targets, evaluating
from everydepth.stream.feed import Feed
from everydepth.stream.states import are_finite, holds_from


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectories:
    """The logits of every sample at depths 0..L, with labels and row numbers.

    logits: `(sample, depth, class)`. gram: `(class, class)`, the Gram matrix `W W^T` of the head,
    for the gradient at the last feature.
    """

    logits: Tensor
    labels: Tensor
    numbers: Tensor
    gram: Tensor

    def signals(self, labels: Tensor) -> dict[str, Floats]:
        """By name, one number per sample, for the given labels."""
        z = self.logits
        index = labels[:, None, None].expand(-1, z.shape[1], 1)
        own = z.gather(-1, index)[..., 0]
        others = z.scatter(-1, index, -torch.inf).amax(-1)
        log_p = (own - z.logsumexp(-1)).double()
        margin = (own - others).double()
        right = margin > 0
        last = z.shape[1] - 1
        top = z.argmax(-1)
        found = {
            **{f"log_p_{depth}": log_p[:, depth] for depth in range(1, last + 1)},
            **{f"margin_{depth}": margin[:, depth] for depth in range(1, last + 1)},
            "mean_log_p": log_p[:, 1:].mean(1),
            "worst_margin": margin[:, 1:].amin(1),
            "prediction_depth": holds_from(right.T),
            "saturation": holds_from((top == top[:, -1:]).T),
            "early_disagreement": (~right[:, 1 : last // 2 + 1]).double().mean(1)
            if last > 1
            else torch.zeros(len(z), dtype=torch.float64),
            "error": self._error(labels),
            "gradient_norm": self._gradient_norm(labels),
        }
        return {name: value.double().numpy() for name, value in found.items()}

    def _residual(self, labels: Tensor) -> Tensor:
        p = self.logits[:, -1].double().softmax(-1)
        return p - nn.functional.one_hot(labels, p.shape[-1])

    def _error(self, labels: Tensor) -> Tensor:
        return self._residual(labels).norm(dim=1)

    def _gradient_norm(self, labels: Tensor) -> Tensor:
        """`||W^T (p - y)||`: the gradient of the loss at the input of the head."""
        r = self._residual(labels)
        return ((r @ self.gram) * r).sum(1).clamp(min=0).sqrt()


@torch.no_grad()
def trajectories(stream: ResidualStream, feed: Feed, progress: bool) -> Trajectories:
    """One pass over the data, every depth read out."""
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    numbers: list[Tensor] = []
    with evaluating(stream):
        for rows, batch in feed.numbered("auditing", progress):
            targets, states = Targets.of(stream, batch, weighted=False), stream.observe(batch)
            each = [
                targets.pick(states.logits(depth)).float().cpu()
                for depth in range(stream.depth + 1)
            ]
            if targets.labels.shape != (stream.rows(batch),):
                raise LabelError(
                    f"{len(targets)} of {stream.rows(batch)} rows have a label, and labels have "
                    f"shape {tuple(targets.labels.shape)}; an audit needs one class for every row"
                )
            logits.append(torch.stack(each, 1))
            if not bool(are_finite(logits[-1]).all()):
                states.check_predictions(lowest=0)
            labels.append(targets.labels.cpu())
            numbers.append(rows)
    if not logits:
        raise BatchError("the data has no samples; pass at least one")
    weight = getattr(stream.head, "weight", None)
    classes = logits[0].shape[-1]
    w = (
        weight.detach().double().cpu()
        if isinstance(weight, Tensor)
        else torch.eye(classes).double()
    )
    return Trajectories(
        logits=torch.cat(logits), labels=torch.cat(labels), numbers=torch.cat(numbers), gram=w @ w.T
    )


def columns(signals: dict[str, Floats]) -> Floats:
    """`(sample, signal)`; infinities from a saturated softmax become large numbers."""
    return np.nan_to_num(np.stack(list(signals.values()), 1), posinf=1e3, neginf=-1e3)
