"""Gradient equilibrium: a block's gradient does not grow with the number of depths above it."""

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
    """Divide the gradient that reaches block l by `n_l`, the total weight of depths l and above.

    `n_l` is relative to the last depth's weight; with equal weights it is the number of depths, as
    in IMTA. To do so, an exit passes `1/n_{l+1}` of its gradient to its state, and the state passes
    `n_{l+1}/n_l` of what it receives to the block that produced it.
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
