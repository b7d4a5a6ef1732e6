"""A term that pulls every prediction toward the last depth's."""

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
    """`weight sum_l w_l T^2 KL(p_L || p_l)` with `p = softmax(z / T)`; `p_L` gets no gradient.

    For embeddings, which are not probabilities, `weight sum_l w_l (1 - cos(z_L, z_l))`.

    w: the weights of the supervised depths. Rows are weighted as in the loss; in a batch without
    labels, all rows except padding count. The any-depth loss computes it one chunk of logits at a
    time.

    words: most are those the last depth finds most likely in this batch; the others are sampled
    from the rest and stand for all of it. The normalizing sums are then correct on average, at a
    fraction of the cost.
    """

    weight: float = setting(1.0, above=0, help="Weight of the term.")
    temperature: float = setting(1.0, above=0, help="T; above 1 softens the predictions.")
    labels: bool = setting(True, help="Depths below the last learn from labels as well.")
    words: int | None = setting(
        None,
        least=16,
        help="Compare only N words of a larger vocabulary per step, in batches without labels.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.words is not None and self.labels:
            raise SettingError(
                f"distilled: words={self.words} with labels=True, but a label may be any word; use "
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
        # No depth below the last has a weight at this step: a zero that supports backward.
        return seen.logits(seen.states.depth)[..., :0].sum()

    def divergences(self, seen: Pass) -> dict[int, Tensor]:
        """`T^2 KL(p_L || p_l)` of the supervised depths below the last."""
        if seen.targets.numbers:
            raise SettingError(
                "distilled compares class probabilities, but this model predicts numbers; leave it "
                "out, or use cosine_regularized, which compares states"
            )
        last = seen.states.depth
        vectors = seen.states.stream.task == "embedding"
        distance = _angle if vectors else partial(_divergence, temperature=self.temperature)
        expected = _rows(seen, last).detach()
        found: dict[int, Tensor] = {}
        for depth in seen.weights:
            if depth < last:
                rows = distance(_rows(seen, depth), expected)
                # With a criterion, a row is a sample that may have several predictions.
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
