"""Batched early exit: rows that are done leave the batch, and the others continue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from everydepth.config import checked
from everydepth.exits.policies import NEVER, Memory, Number, Policy
from everydepth.exits.reading import exit_logits
from everydepth.stream import Batch, ResidualStream, as_stream, evaluating
from everydepth.stream.feed import as_batch
from everydepth.stream.states import are_finite


@dataclass(frozen=True)
class Prediction:
    """The class, exit depth and logits of each row, in the order of the batch.

    >>> found = ed.predict(model, test.batch(range(8)), policy=ed.Confidence(threshold=0.9))
    >>> found.labels.shape, found.depths.shape, found.logits.shape
    (torch.Size([8]), torch.Size([8]), torch.Size([8, 10]))
    """

    labels: Int[Tensor, " rows"]
    depths: Int[Tensor, " rows"]
    logits: Float[Tensor, "rows classes"]


@checked
@torch.no_grad()
def predict(
    model: nn.Module | ResidualStream, batch: Any, *, policy: Policy, **options: Any
) -> Prediction:
    """Predict each row at the depth where the policy lets it exit.

    Predictions and depths are the same as for one row at a time. The model runs in eval mode, and
    its mode is restored.

    batch: a mapping, inputs alone, or `(inputs, labels)`, where labels are ignored.

    >>> policy = ed.calibrate(model, valid, risk=0.2, progress=False)
    >>> found = ed.predict(model, test.batch(range(8)), policy=policy)
    >>> found.depths.shape  # the depth at which each row exited
    torch.Size([8])
    """
    stream = as_stream(model, **options)
    thresholds = policy.for_stream(stream)
    with evaluating(stream):
        return _predict(stream, as_batch(batch, stream), policy, thresholds)


def _predict(
    stream: ResidualStream, batch: Batch, policy: Policy, thresholds: tuple[Number, ...]
) -> Prediction:
    cursor, memory = stream.start(batch), Memory()
    size, device = cursor.batch_size, cursor.h.device
    # The positions of the cursor's rows in the batch.
    rows = torch.arange(size, device=device)
    depths = torch.full((size,), stream.depth, device=device)
    logits = torch.empty(0)
    for depth in range(1, stream.depth + 1):
        cursor = stream.step(cursor)
        last = depth == stream.depth
        threshold = -NEVER if last else thresholds[depth - 1]
        if threshold == NEVER and not policy.remembers:
            continue
        found = exit_logits(stream, stream.exit_state(cursor), depth, cursor.batch)
        if logits.numel() == 0:
            logits = found.new_empty((size, found.shape[-1]))
        if last:
            logits[rows] = found
            break
        score, memory = policy.certainty(found, memory)
        leaves = score >= threshold
        stays = (~leaves).nonzero().flatten()
        if len(stays) == len(rows):
            continue
        done = rows[leaves]
        logits[done], depths[done] = found[leaves], depth
        if len(stays) == 0:
            break
        # Always worth it: copying a state costs far less than running a row through a block.
        cursor = cursor.select(stays)
        memory = tuple(kept[stays] for kept in memory)
        rows = rows[stays]
    if not bool(are_finite(logits).all()):
        stream.observe(batch).check_predictions()
    return Prediction(logits.argmax(-1), depths, logits)
