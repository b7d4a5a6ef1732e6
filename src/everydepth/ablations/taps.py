"""Per-sample gradients and statistics at every residual connection, in one backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everydepth.config import checked
from everydepth.errors import UnsupportedModelError
from everydepth.stream import (
    BranchRecord,
    ResidualStream,
    States,
    Targets,
    at_least_float32,
    evaluating,
    labeled_samples,
    no_labels,
    observe_gradients,
    real_tokens,
)


@dataclass(frozen=True, eq=False)
class Taps:
    """One batch. Rows are the labeled samples.

    norms: per layer, `(branches, samples)`: `||dLoss_i/dx||` at the input of each branch, `x_l` and
        `x~_l` of a transformer. It is the gradient of the stream and includes the skip path.
    std: per layer, likewise: the standard deviation of the entries of `x`, without padding.
    least_std: per layer, likewise: the smallest one of any token, the least a norm divides by.
    error: `||dLoss_i/dz||`, for a classifier `||softmax(z) - onehot(y)||`.
    margin: of the prediction, averaged over a sample's targets.
    length: tokens (or positions) of each sample, without padding.
    last_std: the smallest standard deviation of any input vector of the readout's norm.
    """

    norms: Sequence[Tensor]
    std: Sequence[Tensor]
    least_std: Sequence[Tensor]
    error: Tensor
    losses: Tensor
    margin: Tensor
    length: Tensor
    last_std: Tensor


@checked
def tapped(stream: ResidualStream, batch: Mapping[str, Any], *, statistics: bool = True) -> Taps:
    """Observe a batch and take the gradient of its losses at every connection.

    The model runs in eval mode, in which samples are independent, so the rows of the gradient of
    the summed loss are per-sample gradients. Parameters get none, so the backward pass is cheaper
    than in training.
    """
    if not any(block.branches for block in stream.blocks):
        raise UnsupportedModelError(
            f"{stream.name} is known only block by block, without its branches, so gradients "
            "inside a block cannot be read; teach everydepth its branches "
            "(docs/add-an-architecture.md)"
        )
    kept = labeled_samples(stream, batch)
    if kept is None:
        raise no_labels()
    with evaluating(stream):
        states, records, gradients = observe_gradients(stream, kept)
        last = states.logits(stream.depth), states.feature(stream.depth)
    targets = Targets.of(stream, states.batch)
    z, feature = at_least_float32(targets.pick(last[0])).detach(), last[1].detach()
    losses, samples = gradients.losses, targets.samples
    mask = _real(states, records)
    classes = targets.has_classes
    measured = records if statistics else []
    return Taps(
        norms=gradients.branch_norms,
        std=[torch.stack([_std(r, mask) for r in block]) for block in measured],
        least_std=[
            torch.stack([_least_std(r.x.detach().reshape(r.shape), mask) for r in block])
            for block in measured
        ],
        error=gradients.logit_norms,
        losses=losses,
        margin=_sample_margins(targets, z) if classes else losses.new_full((samples,), torch.nan),
        length=_lengths(mask, records),
        last_std=_least_std(feature, mask),
    )


def margins(z: Tensor) -> Tensor:
    """Top-1 minus top-2 logit of every row."""
    first, second = z.topk(2, -1).values.unbind(-1)
    return first - second


def _sample_margins(targets: Targets, z: Tensor) -> Tensor:
    return targets.sample_sums(margins(z)) / targets.sample_weights


def _real(states: States, records: Sequence[Sequence[BranchRecord]]) -> Tensor | None:
    """(batch, token): tokens that are not padding; None without padding."""
    first = next(block[0] for block in records if block)
    shape = tuple(first.shape[:2])
    real = real_tokens(states.stream, states.batch, shape, first.x.device)
    return None if real is None or bool(real.all()) else real


def _std(record: BranchRecord, mask: Tensor | None) -> Tensor:
    x = at_least_float32(record.x.detach().reshape(record.shape))
    if mask is None:
        return x.flatten(1).std(1, correction=0)
    return torch.stack([row[kept].std(correction=0) for row, kept in zip(x, mask, strict=True)])


def _lengths(mask: Tensor | None, records: Sequence[Sequence[BranchRecord]]) -> Tensor:
    if mask is not None:
        return mask.sum(1)
    shape = next(block[0].shape for block in records if block)
    positions = shape[1] if len(shape) == 3 else 1
    return torch.full((shape[0],), positions)


def _least_std(feature: Tensor, mask: Tensor | None) -> Tensor:
    std = at_least_float32(feature).std(-1, correction=0)
    if mask is not None and std.shape == mask.shape:
        std = std.masked_fill(~mask, torch.inf)
    return std if std.ndim == 1 else std.flatten(1).amin(1)
