"""A pull of every prediction towards the last depth's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from everydepth.config import setting
from everydepth.errors import SettingError
from everydepth.objectives.term import Pass, Term
from everydepth.stream import at_least_float32


@dataclass(frozen=True, kw_only=True)
class Distilled(Term, name="distilled"):
    """`weight sum_l w_l T^2 KL(p_L || p_l)` with `p = softmax(z / T)`, the last one taken as given.

    Of embeddings, which are no chances, `weight sum_l w_l (1 - cos(z_L, z_l))`.

    w: the weights of the supervised depths. Rows count as they do in the loss; where a batch has no
    labels, all that are not padding. The any-depth loss computes it a chunk of logits at a time.

    words: in training most of them are those the last depth finds likely in this batch; the others
    are drawn from the rest and stand for all of it. The sums that make chances of logits are then
    right on average, at a fraction of their cost.
    """

    weight: float = setting(1.0, above=0, help="Its weight.")
    temperature: float = setting(1.0, above=0, help="T: above 1 softens the predictions.")
    labels: bool = setting(True, help="Let depths below the last learn from labels, too.")
    words: int | None = setting(
        None,
        least=16,
        help="Of a larger vocabulary, compare so many words a step, where a batch has no labels.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.words is not None and self.labels:
            raise SettingError(
                f"distilled: words={self.words} with labels=True, which may be any word; use "
                "labels=False, or leave words out"
            )

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
        """How far the supervised depths below the last are from it: `T^2 KL(p_L || p_l)`."""
        if seen.targets.numbers:
            raise SettingError(
                "distilled compares chances of classes, but this model predicts numbers; leave it "
                "out, or use cosine_regularized, which compares states"
            )
        last = seen.states.depth
        vectors = seen.states.stream.task == "embedding"
        apart = _angle if vectors else partial(_divergence, temperature=self.temperature)
        expected = _rows(seen, last).detach()
        found: dict[int, Tensor] = {}
        for depth in seen.weights:
            if depth < last:
                rows = apart(_rows(seen, depth), expected)
                # With a criterion a row is a sample, which may make several predictions.
                each = rows.flatten(1).mean(1) if rows.ndim > 1 else rows
                scale = seen.targets.class_scale.to(each)
                found[depth] = (scale * each).sum()
        return found


def _rows(seen: Pass, depth: int) -> Tensor:
    return at_least_float32(seen.targets.pick(seen.logits(depth)))


def _divergence(z: Tensor, expected: Tensor, *, temperature: float) -> Tensor:
    p, q = ((x / temperature).log_softmax(-1) for x in (expected, z))
    return temperature**2 * F.kl_div(q, p, reduction="none", log_target=True).sum(-1)


def _angle(z: Tensor, expected: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(z, expected, dim=-1)
