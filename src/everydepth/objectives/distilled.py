"""A pull of every prediction towards the last depth's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from everydepth.config import setting
from everydepth.errors import SettingError
from everydepth.objectives.term import Pass, Term
from everydepth.stream import at_least_float32


@dataclass(frozen=True, kw_only=True)
class Distilled(Term, name="distilled"):
    """`weight sum_l w_l T^2 KL(p_L || p_l)` with `p = softmax(z / T)`, the last one taken as given.

    w: the weights of the supervised depths. Rows count as they do in the loss; where a batch has no
    labels, all that are not padding. The any-depth loss computes it a chunk of logits at a time.
    """

    weight: float = setting(1.0, above=0, help="Its weight.")
    temperature: float = setting(1.0, above=0, help="T: above 1 softens the predictions.")
    labels: bool = setting(True, help="Let depths below the last learn from labels, too.")

    @property
    def replaces_labels(self) -> bool:
        return not self.labels

    @property
    def needs_labels(self) -> bool:
        return False

    def __call__(self, seen: Pass) -> Tensor:
        found = [self.weight * seen.weights[d] * kl for d, kl in self.divergences(seen).items()]
        if found:
            return sum(found[1:], start=found[0])
        # No depth below the last has a weight now: a sum of nothing, which can go backward.
        return seen.logits(seen.states.depth)[..., :0].sum()

    def divergences(self, seen: Pass) -> dict[int, Tensor]:
        """`T^2 KL(p_L || p_l)` of the supervised depths below the last."""
        if seen.targets.numbers:
            raise SettingError(
                "distilled compares chances of classes, but this model predicts numbers; leave it "
                "out, or use cosine_regularized, which compares states"
            )
        last = seen.states.depth
        expected = self._softened(seen, last).detach()
        found: dict[int, Tensor] = {}
        for depth in seen.weights:
            if depth < last:
                rows = F.kl_div(
                    self._softened(seen, depth), expected, reduction="none", log_target=True
                )
                # With a criterion a row is a sample, which may make several predictions.
                each = rows.sum(-1).flatten(1).mean(1) if rows.ndim > 2 else rows.sum(-1)
                scale = seen.targets.class_scale.to(each)
                found[depth] = self.temperature**2 * (scale * each).sum()
        return found

    def _softened(self, seen: Pass, depth: int) -> Tensor:
        z = at_least_float32(seen.targets.pick(seen.logits(depth)))
        return (z / self.temperature).log_softmax(-1)
