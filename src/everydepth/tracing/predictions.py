"""Statistics of every row's prediction at every depth, computed on request."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor

from everydepth.stream import at_least_float32
from everydepth.stream.states import are_finite
from everydepth.stream.words import row_blocks, word_statistics

if TYPE_CHECKING:
    from everydepth.tracing.observation import Observation

LOGIT_BYTES = 2**25  # of logits in memory at once, per depth
NUMBERS = frozenset({"loss", "error", "absolute", "followed", "step"})
CLASSES = frozenset(
    {"loss", "error", "followed", "step", "top", "rank", "confidence", "margin"},
)


class _Field:
    """A field of `Predictions`, computed when it is first read."""

    def __init__(self, about: str) -> None:
        self.__doc__ = about

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, found: Predictions, owner: type) -> Tensor:
        return found.field(self._name)


class Predictions:
    """One value per depth and row, `(depth, row)`.

    A field is computed when it is first read, together with those that metrics said they use
    (`BatchMetric.reads`), in one sweep over the logits of all depths.
    """

    loss = _Field("Cross-entropy (nat), or the mean squared error over outputs.")
    error = _Field("`||softmax(z) - onehot(y)||`; in a regression, `||f(x) - z||`.")
    followed = _Field("The logit of the target, or without one of the final prediction.")
    step = _Field("(blocks 1..L, rows): `||z_l - z_{l-1}||`, what block l adds in output space.")
    top = _Field("The predicted class.")
    rank = _Field("The number of classes that score above the target; 0 if top-1 is right.")
    confidence = _Field("The largest probability.")
    margin = _Field("Top-1 minus top-2 logit.")
    absolute = _Field("Mean absolute error over outputs; regression only.")

    def __init__(self, observation: Observation, reads: Collection[str] = ()) -> None:
        # Weak: a reference cycle would keep all states until the next garbage collection.
        self._of, self._reads = ref(observation), frozenset(reads)
        self._found: dict[str, Tensor] = {}

    @property
    def _observation(self) -> Observation:
        found = self._of()
        assert found is not None, "predictions are read while their observation exists"
        return found

    @property
    def labeled(self) -> Tensor:
        """(rows,): which rows have a target; loss, rank and error are meaningless for others."""
        return self._observation.asked.labeled

    def find(self) -> None:
        """Compute the fields that metrics said they use."""
        self._sweep(self._reads)

    def field(self, name: str) -> Tensor:
        """The field of this name."""
        if name not in self._found:
            self._sweep({name, *self._reads})
        return self._found[name]

    def _sweep(self, names: Collection[str]) -> None:
        if not names:
            return
        o = self._observation
        known = NUMBERS if o.stream.task == "regression" else CLASSES
        missing = frozenset(names) & known - set(self._found)
        if missing:
            found = _swept(o, missing)
            if not _is_finite(o, found):
                o.states.check_predictions(lowest=0)
            self._found.update(found)
        none = self.labeled.new_empty(0, len(o.rows))
        self._found.update({n: none for n in names if n not in self._found})


@torch.no_grad()
def _swept(o: Observation, names: frozenset[str]) -> dict[str, Tensor]:
    """All depths together if outputs are few, by words for a large linear head, else by rows."""
    if o.has_few_outputs:
        return _chunk(o, slice(None), names, len(o.depths))
    if o.by_words and (o.asked.labels is None or o.asked.labels.ndim == 1):
        rows = row_blocks(len(o.rows), len(o.depths))
        blocks = [o.head_inputs(block) for block in rows]
        follow = _followed(o, slice(None), names)
        assert follow is not None
        head = o.stream.linear_head("a sweep over words")
        return word_statistics(blocks, head.weight, head.bias, follow, names)
    count = len(o.rows)
    size = max(1, LOGIT_BYTES // (4 * o.outputs))
    pieces = [_chunk(o, slice(i, min(i + size, count)), names, 1) for i in range(0, count, size)]
    return {name: torch.cat([piece[name] for piece in pieces], -1) for name in names}


def _is_finite(o: Observation, found: Mapping[str, Tensor]) -> bool:
    """Whether every prediction is finite, as far as the computed fields show."""
    if o.has_few_outputs:
        return bool(are_finite(o.readouts).all())
    values = [value for value in found.values() if value.is_floating_point()]
    return all(bool(torch.isfinite(value).all()) for value in values)


def _followed(o: Observation, rows: slice, names: frozenset[str]) -> Tensor | None:
    """The class to follow in each row: its label, or the final prediction if that is needed."""
    if o.stream.task == "regression":
        return None
    labeled = o.asked.labeled[rows]
    classes = o.asked.classes
    follow = torch.zeros(len(labeled), dtype=torch.long, device=labeled.device)
    if classes is not None:
        follow = torch.where(labeled, classes[rows], 0)
    alone = (~labeled).nonzero().flatten()
    if "followed" in names and len(alone):
        size = max(1, LOGIT_BYTES // (4 * o.outputs))
        places = torch.arange(len(o.rows), device=alone.device)[rows][alone]
        tops = [o.logits(o.depth, part).argmax(-1) for part in places.split(size)]
        follow[alone] = torch.cat(tops).to(follow.device)
    return follow


def _chunk(o: Observation, rows: slice, names: frozenset[str], group: int) -> dict[str, Tensor]:
    labels = o.asked.labels
    targets = None if labels is None else labels[rows]
    shares = targets if targets is not None and targets.ndim == 2 else None
    follow = _followed(o, rows, names)
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    previous: Tensor | None = None
    for start in range(0, len(o.depths), group):
        z = o.readouts if group > 1 else at_least_float32(o.logits(start, rows).detach())[None]
        if follow is None:
            values = _regression(z, targets, names)
        else:
            values = _classification(z, follow, shares, names)
        if "step" in names:
            step = z.diff(dim=0) if previous is None else z - previous
            values["step"] = torch.linalg.vector_norm(step, dim=-1)
            previous = z[-1:]
        for name, value in values.items():
            found[name].append(value)
    empty = o.asked.labeled.new_empty(0, len(o.asked.labeled[rows]))
    return {name: torch.cat(v) if v else empty for name, v in found.items()}


def _classification(
    z: Tensor, follow: Tensor, shares: Tensor | None, names: frozenset[str]
) -> dict[str, Tensor]:
    """The fields for `z` (depth, row, class). shares: soft labels; `follow` is their largest."""
    found: dict[str, Tensor] = {}
    followed = z.gather(-1, follow.expand(z.shape[:-1])[..., None])[..., 0]
    if "followed" in names:
        found["followed"] = followed
    if "rank" in names:
        found["rank"] = (z > followed[..., None]).sum(-1).int()
    first: Tensor | None = None
    if names & {"top", "margin"}:
        highest, classes = z.topk(min(2, z.shape[-1]), -1)
        first = highest[..., 0]
        values = {"top": classes[..., 0].int(), "margin": first - highest[..., -1]}
        found |= {name: value for name, value in values.items() if name in names}
    if not names & {"loss", "error", "confidence"}:
        return found
    total = torch.logsumexp(z, -1)
    if "confidence" in names:
        found["confidence"] = ((z.amax(-1) if first is None else first) - total).exp()
    y = None if shares is None else shares.to(z.dtype)
    if "loss" in names:
        soft = None if y is None else total * y.sum(-1) - (z * y).sum(-1)
        found["loss"] = total - followed if soft is None else soft
    if "error" in names and y is not None:
        found["error"] = torch.linalg.vector_norm((z - total[..., None]).exp() - y, dim=-1)
    elif "error" in names:
        # ||p - y||^2 = sum p^2 - 2 p_y + 1
        squares = (torch.logsumexp(2 * z, -1) - 2 * total).exp()
        error = squares - 2 * (followed - total).exp() + 1
        found["error"] = error.clamp(min=0).sqrt()
    return found


def _regression(z: Tensor, targets: Tensor | None, names: frozenset[str]) -> dict[str, Tensor]:
    found = {"followed": z[..., 0]}
    if targets is not None:
        difference = z - targets.reshape(z.shape[1:]).to(z.dtype)
        found |= {
            "loss": difference.square().mean(-1),
            "error": torch.linalg.vector_norm(difference, dim=-1),
            "absolute": difference.abs().mean(-1),
        }
    return {name: value for name, value in found.items() if name in names}
