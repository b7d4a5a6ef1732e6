"""What an objective adds to the weighted losses, or does to their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from everydepth.stream import States, at_least_float32


def cosine_distance(
    states: States, weights: Sequence[float], pick: Callable[[Tensor], Tensor]
) -> Tensor:
    """`sum_l v_l mean(1 - cos(h_l, h_L))` over what predicts (SPEC 2.8)."""
    last = pick(states.feature(states.depth))
    total = last.new_zeros(())
    for depth in range(states.depth):
        if weights[depth] > 0:
            cosine = F.cosine_similarity(pick(states.feature(depth)), last, dim=-1)
            total = total + weights[depth] * (1 - cosine).mean()
    return total


def divergence(
    logits: Mapping[int, Tensor],
    teacher: Tensor,
    weights: Mapping[int, float],
    temperature: float,
    pick: Callable[[Tensor], Tensor],
) -> Tensor:
    """`sum_l w_l T^2 KL(p_L || p_l)`, softened predictions, the last one taken as given."""
    expected = (at_least_float32(pick(teacher)).detach() / temperature).log_softmax(-1)
    total = expected.new_zeros(())
    for depth, weight in weights.items():
        found = (at_least_float32(pick(logits[depth])) / temperature).log_softmax(-1)
        rows = F.kl_div(found, expected, reduction="none", log_target=True).sum(-1)
        total = total + weight * temperature**2 * rows.mean()
    return total


def balanced(states: States, weights: Sequence[float]) -> States:
    """The states as exits read them, with gradient equilibrium.

    Let `n_l` be the weight of the depths from l on, in units of the last supervised one. Block l
    then receives `1/n_l` of the gradient of all depths from l on: an exit passes `1/n_{l+1}` to its
    state, and the state `n_{l+1}/n_l` of what it received to the block that made it.
    """
    unit = next(weight for weight in reversed(weights) if weight > 0)
    n = [sum(weights[depth:]) / unit for depth in range(len(weights) + 1)]
    exits: list[Tensor] = []
    for depth, h in enumerate(states.h):
        here, after = n[depth], n[depth + 1]
        passed = 1 / after if after > 0 else 1 / max(here, 1.0)
        exit_state = h
        if h.requires_grad and weights[depth] > 0 and passed != 1:
            exit_state = h.view_as(h)
            exit_state.register_hook(partial(torch.mul, passed))
        if h.requires_grad and after > 0 and after != here:
            h.register_hook(partial(torch.mul, after / here))
        exits.append(exit_state)
    return replace(states, h=tuple(exits))
