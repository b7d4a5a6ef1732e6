"""What every depth predicts for every row, in one sweep over depths and chunks of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from everydepth.tracing.observation import Observation

LOGIT_BYTES = 2**25  # logits of this many bytes are alive at once, per depth


@dataclass(frozen=True, eq=False)
class Predictions:
    """One value per depth 0..L and row. Classes first; a regression fills only the last group.

    labelled: (rows,) rows that have a target; loss, rank and error say nothing about the others.
    loss: cross-entropy (nat), or the mean squared error over outputs.
    top: the predicted class. rank: how many classes score above the target (0: top-1 is right).
    confidence: largest probability. margin: top-1 minus top-2 logit.
    error: `||softmax(z) - onehot(y)||`, or `||f(x) - z||` where numbers are predicted.
    absolute: mean absolute error over outputs, regression only.
    followed: the logit of the target, or of the final prediction where there is none.
    step: (blocks 1..L, rows) `||z_l - z_{l-1}||`, what block l adds in output space.
    """

    labelled: Tensor
    loss: Tensor
    error: Tensor
    followed: Tensor
    step: Tensor
    top: Tensor
    rank: Tensor
    confidence: Tensor
    margin: Tensor
    absolute: Tensor


@torch.no_grad()
def predictions(o: Observation) -> Predictions:
    """Sweep the depths; few outputs at all depths together, many in chunks of rows, depth by depth.

    So at most a few times `LOGIT_BYTES` of logits are held at once.
    """
    rows = o.features.shape[1]
    group = len(o.states) if o.has_few_outputs else 1
    size = rows if o.has_few_outputs else max(1, LOGIT_BYTES // (4 * o.outputs))
    pieces = [_chunk(o, slice(start, start + size), group) for start in range(0, rows, size)]
    if len(pieces) == 1:
        return pieces[0]
    names = Predictions.__dataclass_fields__
    return Predictions(**{n: torch.cat([getattr(p, n) for p in pieces], -1) for n in names})


def _chunk(o: Observation, rows: slice, group: int) -> Predictions:
    final = _wide(o.logits(o.depth, rows))
    asked = o.asked
    targets = None if asked.labels is None else asked.labels[rows].to(final.device)
    labelled = asked.labelled[rows].to(final.device)
    n = final.shape[0]
    shares = follow = None
    if o.stream.task != "regression":
        shares = targets if targets is not None and targets.ndim == 2 else None
        classes = targets if shares is None else shares.argmax(-1)
        top = final.argmax(-1)
        follow = top if classes is None else torch.where(labelled, classes, top)
    names = ("loss", "error", "followed", "top", "rank", "confidence", "margin", "absolute")
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    steps: list[Tensor] = []
    previous: Tensor | None = None
    for start in range(0, o.depth + 1, group):
        z = o.readouts if group > 1 else _wide(o.logits(start, rows))[None]
        values = _regression(z, targets) if follow is None else _classification(z, follow, shares)
        for name, value in values.items():
            found[name].append(value)
        step = z.diff(dim=0) if previous is None else z - previous
        steps.append(torch.linalg.vector_norm(step, dim=-1))
        previous = z[-1:]
    stacked = {name: torch.cat(v) if v else labelled.new_empty(0, n) for name, v in found.items()}
    return Predictions(labelled=labelled, step=torch.cat(steps), **stacked)


def _wide(z: Tensor) -> Tensor:
    """Logits in at least float32: losses of half-precision models are summed in it."""
    z = z.detach()
    return z if z.dtype == torch.float64 else z.float()


def _classification(z: Tensor, follow: Tensor, shares: Tensor | None) -> dict[str, Tensor]:
    """`z` is (depth, row, class). shares: soft labels, of which `follow` is the largest."""
    followed = z.gather(-1, follow.expand(z.shape[:-1])[..., None])[..., 0]
    total = torch.logsumexp(z, -1)
    highest, classes = z.topk(min(2, z.shape[-1]), -1)
    first, second = highest[..., 0], highest[..., -1]
    chance = (followed - total).exp()
    # ||p - y||^2 = sum p^2 - 2 p_y + 1
    squares = (torch.logsumexp(2 * z, -1) - 2 * total).exp()
    loss, error = total - followed, squares - 2 * chance + 1
    if shares is not None:
        y = shares.to(z.dtype)
        loss = total * y.sum(-1) - (z * y).sum(-1)
        error = ((z - total[..., None]).exp() - y).square().sum(-1)
    return {
        "loss": loss,
        "error": error.clamp(min=0).sqrt(),
        "followed": followed,
        "top": classes[..., 0].int(),
        "rank": (z > followed[..., None]).sum(-1).int(),
        "confidence": (first - total).exp(),
        "margin": first - second,
    }


def _regression(z: Tensor, targets: Tensor | None) -> dict[str, Tensor]:
    if targets is None:
        return {"followed": z[..., 0]}
    difference = z - targets.reshape(z.shape[1:]).to(z.dtype)
    return {
        "loss": difference.square().mean(-1),
        "error": torch.linalg.vector_norm(difference, dim=-1),
        "absolute": difference.abs().mean(-1),
        "followed": z[..., 0],
    }
