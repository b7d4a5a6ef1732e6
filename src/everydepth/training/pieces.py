"""Get a batch ready: split it into pieces for gradient accumulation, and weight their losses."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor

from everydepth.data import Batch
from everydepth.stream import (
    LABELED_TOKEN_TASKS,
    TOKEN_TASKS,
    ResidualStream,
    Targets,
    has_labels,
    no_labels,
    with_labels,
)
from everydepth.stream.feed import moved
from everydepth.stream.rows import pick_rows
from everydepth.training.module import EveryDepth
from everydepth.training.processes import of_every_process


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A batch that can be trained on.

    amounts: what the mean loss of each piece is a mean over; None for one piece in one process.
    labels: how many labels a first batch has; None if it uses none, or was not checked.
    """

    batch: Batch
    pieces: list[Batch]
    amounts: Tensor | None
    labels: int | None


def ready(
    raw: Batch, net: EveryDepth, accelerator: Accelerator, count: int, *, first: bool
) -> Ready:
    """A batch in `count` pieces, checked as far as this process can do it alone.

    first: check the labels, which waits for the device.
    """
    batch = cast(Batch, moved(raw, accelerator.device))
    if net.objective.needs_labels or has_labels(net.stream, batch):
        batch = dict(with_labels(net.stream, batch))
    pieces = pieces_of(batch, count, net.stream)
    labels = net.check_labels(batch) if first else None
    amounts = None
    if len(pieces) > 1 or accelerator.num_processes > 1:
        amounts = torch.stack([_amount(piece, net) for piece in pieces]).float()
    return Ready(batch=batch, pieces=pieces, amounts=amounts, labels=labels)


def check_first(found: Ready, accelerator: Accelerator) -> None:
    """Raise if no process has a label to learn from; all must call it."""
    counts = of_every_process(found.labels, accelerator)
    if not any(count is None or count for count in counts):
        raise no_labels()


def pieces_of(batch: Batch, count: int, stream: ResidualStream) -> list[Batch]:
    """The batch in `count` pieces of nearly equal size, or in one if it has fewer rows."""
    size = stream.rows(batch)
    if count == 1 or size < count:
        return [batch]
    bounds = [size * i // count for i in range(count + 1)]
    return [pick_rows(batch, slice(a, b), size) for a, b in pairwise(bounds)]


def shares_of(ready: Ready, accelerator: Accelerator) -> list[Tensor] | list[None]:
    """The weight of each piece's mean loss in the mean over the whole batch; None if it is 1.

    The number of processes is a factor because DDP and FSDP average their gradients. Does not wait
    for the device.
    """
    if ready.amounts is None:
        return [None]
    processes = accelerator.num_processes
    amounts = ready.amounts.to(accelerator.device)
    total = amounts.sum()
    if processes > 1:
        total = cast(Tensor, accelerator.reduce(total))
    return list((amounts * processes / total.clamp_min(1e-12)).unbind())


def _amount(piece: Batch, net: EveryDepth) -> Tensor:
    """What the mean loss of a piece is a mean over, as in `EveryDepth`."""
    stream = net.stream
    if has_labels(stream, piece) and not net.ignores_labels:
        how: Any = {"class_weights": net.class_weights, "criterion": net.criterion}
        return Targets.of(stream, piece, check=False, **how).amount
    if stream.task in LABELED_TOKEN_TASKS and piece.get("labels") is not None:
        # Labels from which nothing is learned still select the tokens; see `Targets.every`.
        return Targets.of(stream, piece, weighted=False, check=False).amount
    mask = piece.get("decoder_attention_mask" if stream.task == "seq2seq_lm" else "attention_mask")
    if stream.task in TOKEN_TASKS and isinstance(mask, Tensor):
        return (mask != 0).sum()
    return torch.tensor(stream.rows(piece))
