"""A pull of every prediction towards the last depth's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from everydepth.config import setting
from everydepth.objectives.term import Pass, Term
from everydepth.stream import at_least_float32


@dataclass(frozen=True, kw_only=True)
class Divergence(Term, name="divergence"):
    """`weight sum_l w_l T^2 KL(p_L || p_l)` with `p = softmax(z / T)`, the last one taken as given.

    w: the weights of the supervised depths.
    """

    weight: float = setting(above=0, help="Its weight.")
    temperature: float = setting(1.0, above=0, help="T: above 1 softens the predictions.")

    def __call__(self, seen: Pass) -> Tensor:
        pick = seen.targets.pick
        expected = self._softened(pick(seen.logits(seen.states.depth)).detach())
        total = expected.new_zeros(())
        for depth, weight in seen.weights.items():
            found = self._softened(pick(seen.logits(depth)))
            rows = F.kl_div(found, expected, reduction="none", log_target=True).sum(-1)
            total = total + weight * self.temperature**2 * rows.mean()
        return self.weight * total

    def _softened(self, logits: Tensor) -> Tensor:
        return (at_least_float32(logits) / self.temperature).log_softmax(-1)
