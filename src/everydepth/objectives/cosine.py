"""A term that pulls every state toward the last one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from everydepth.config import setting
from everydepth.objectives.shapes import Linear, Shape
from everydepth.objectives.term import Pass, Term


@dataclass(frozen=True, kw_only=True)
class CosineDistance(Term, name="cosine"):
    """`beta sum_l v_l mean(1 - cos(h_l, h_L))` over the rows that predict.

    The regularized baseline of Tracing Representations.
    """

    whole_logits: ClassVar[bool] = False
    beta: float = setting(least=0, help="Weight of the term.")
    shape: Shape = setting(Linear(), help="Weights v by depth.")

    def __call__(self, seen: Pass) -> Tensor:
        states, pick = seen.states, seen.targets.pick
        last = pick(states.feature(states.depth))
        total = last.new_zeros(())
        weights = (self.beta * self.shape.weights(states.depth)).tolist()
        for depth, weight in enumerate(weights[:-1]):
            if weight > 0:
                cosine = F.cosine_similarity(pick(states.feature(depth)), last, dim=-1)
                total = total + weight * (1 - cosine).mean()
        return total

    def check_depth(self, depth: int) -> None:
        self.shape.check_depth(depth)
