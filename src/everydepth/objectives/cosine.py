"""A term that pulls every state toward the last one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from everydepth.config import setting
from everydepth.objectives.shapes import Linear, Shape
from everydepth.objectives.term import Pass, Term
from everydepth.stream import at_least_float32


@dataclass(frozen=True, kw_only=True)
class CosineDistance(Term, name="cosine"):
    """`beta sum_l v_l mean(1 - cos(h_l, h_L))` over the rows that predict, weighted as in the loss.

    The regularized baseline of Tracing Representations.
    """

    whole_logits: ClassVar[bool] = False
    beta: float = setting(least=0, help="Weight of the term.")
    shape: Shape = setting(Linear(), help="Weights v by depth.")

    def __call__(self, seen: Pass) -> Tensor:
        states, pick = seen.states, seen.targets.pick
        last = pick(states.feature(states.depth))
        scale = seen.targets.class_scale
        total = last.new_zeros(())
        weights = (self.beta * self.shape.weights(states.depth)).tolist()
        for depth, weight in enumerate(weights[:-1]):
            if weight > 0:
                cosine = F.cosine_similarity(pick(states.feature(depth)), last, dim=-1)
                far = at_least_float32(1 - cosine)
                # With a criterion, a row is a sample that may have several features.
                far = far.flatten(1).mean(1) if far.ndim > 1 else far
                total = total + weight * (scale.to(far) * far).sum()
        return total

    def check_depth(self, depth: int) -> None:
        self.shape.check_depth(depth)
