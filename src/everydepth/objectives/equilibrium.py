"""Gradient equilibrium: the gradient of a block does not grow with the depths above it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from everydepth.objectives.technique import Technique
from everydepth.stream import States


@dataclass(frozen=True, kw_only=True)
class Equilibrium(Technique, name="equilibrated"):
    """The gradient that reaches block l is divided by the weight of all depths from l on.

    In units of the last depth's weight (IMTA: with equal weights, by their number). Let `n_l` be
    that weight. Block l then receives `1/n_l` of the gradient of all depths from l on: an exit
    passes `1/n_{l+1}` to its state, and the state `n_{l+1}/n_l` of what it received to the block
    that made it.
    """

    def exits(self, states: States, weights: Sequence[float]) -> States:
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
