"""Gradients of each sample's loss at every state and branch, from one backward pass per batch."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from everydepth.stream.contract import ResidualStream
from everydepth.stream.modes import differentiating, requiring
from everydepth.stream.states import States
from everydepth.stream.taps import BranchRecord, hooked, record_branches, state_in, with_state
from everydepth.stream.targets import Targets, at_least_float32
from everydepth.stream.wrapping import unwrapped


def disagreement_bound(mu: float, top: float, trace: float, n: int, m: int) -> float:
    """Bounds the probability that the mean gradients of n and of m samples disagree in direction.

    Depth Expansion, Theorem 5; 1 if vacuous. mu: the squared norm of the expected gradient.
    top, trace: largest eigenvalue and trace of the covariance of one sample's gradient.
    """
    if mu <= 0:
        return 1.0
    bound = 4 * top / (n * mu) + 4 * top / (m * mu) + 4 * top * trace / (n * m * mu**2)
    return min(bound, 1.0)


def spectrum(rows: Tensor) -> tuple[float, float]:
    """Trace and largest eigenvalue of the covariance of `(sample, dim)` rows.

    They are computed from the smaller of the two Gram matrices.
    """
    centered = rows.double() - rows.double().mean(0)
    small = centered @ centered.T if len(rows) < rows.shape[1] else centered.T @ centered
    small = small / (len(rows) - 1)
    return float(small.trace()), float(torch.linalg.eigvalsh(small)[-1])


def summed_over_positions(gradient: Tensor) -> Tensor:
    """`(sample, dim)` of a gradient `(sample, [token,] dim)` or `(sample, dim, height, width)`."""
    wide = at_least_float32(gradient)
    if wide.ndim == 4:
        return wide.sum((2, 3))
    return wide if wide.ndim == 2 else wide.flatten(1, -2).sum(1)


@dataclass(frozen=True, eq=False)
class TapGradients:
    """`dLoss_i/dh_l` for l = 0..L, `dLoss_i/dx` at the entry of every branch, `dLoss_i/dz`.

    The losses are summed over samples, so each row of a gradient is one sample's own (in eval mode
    samples are independent). Gradients are those of the stream and include the skip path.
    """

    losses: Tensor
    states: Sequence[Tensor]
    branches: Sequence[Sequence[Tensor]]
    logits: Tensor

    @cached_property
    def state_norms(self) -> Tensor:
        """(depths 0..L, samples)"""
        return torch.stack([_norms(g) for g in self.states])

    @cached_property
    def branch_norms(self) -> list[Tensor]:
        """Per block (branches, samples)."""
        empty = self.losses.new_empty(0, len(self.losses))
        return [torch.stack([_norms(g) for g in b]) if b else empty for b in self.branches]

    @cached_property
    def logit_norms(self) -> Tensor:
        """(samples,): for a classifier, `||softmax(z) - onehot(y)||`."""
        return _norms(self.logits)

    @cached_property
    def vectors(self) -> list[Tensor]:
        """Per depth 0..L, (samples, dim): the gradient summed over tokens or positions.

        This is the gradient with respect to a common shift of all positions.
        """
        return [summed_over_positions(g) for g in self.states]


def observe_gradients(
    stream: ResidualStream, batch: Mapping[str, Any]
) -> tuple[States, list[list[BranchRecord]], TapGradients]:
    """Observe a batch and compute the gradients of its losses at every state and branch.

    Parameters get no gradient, so the backward pass costs about half that of training. Samples
    without a label have no loss and are left out. Raise if predictions are not finite.
    """
    targets = Targets.of(stream, batch, weighted=False)
    with differentiating(), _only_the_stream(stream), record_branches(stream.blocks) as records:
        states = stream.observe(batch)
        logits = states.logits(stream.depth)
        losses = targets.sample_losses(targets.pick(logits))
        total = losses.sum()
    if not bool(total.isfinite()):  # also where the label is a class that is ruled out
        states.check_predictions(stream.depth)
    wanted = [*states.h, *(record.x for block in records for record in block), logits]
    unique = list({id(t): t for t in wanted}.values())
    grads = torch.autograd.grad(total, unique, allow_unused=True, materialize_grads=True)
    if not bool(targets.known.all()):
        grads = tuple(g[targets.known] for g in grads)
        losses = losses[targets.known]
    by_id = {id(t): g for t, g in zip(unique, grads, strict=True)}
    taps = TapGradients(
        losses.detach(),
        [by_id[id(h)] for h in states.h],
        [[by_id[id(r.x)].reshape(-1, *r.shape[1:]) for r in block] for block in records],
        by_id[id(logits)],
    )
    return states, records, taps


@contextmanager
def _only_the_stream(stream: ResidualStream) -> Generator[None, None, None]:
    """Gradients start at `h_0` and reach no parameter inside the context."""
    parameters = [p for p in unwrapped(stream.model).parameters() if p.requires_grad]

    def start(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        h = state_in(args, kwargs).detach().requires_grad_()
        return with_state(args, kwargs, h.view_as(h))  # no leaf: a block may change it in place

    first = stream.blocks[0].module.register_forward_pre_hook(start, with_kwargs=True)
    with hooked(first), requiring(parameters, False):
        yield


def _norms(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(at_least_float32(gradient).flatten(1), dim=1)
