"""Plain training of a grown model through `fit`, and data that growth iterates many times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from everydepth.data.sets import random_stream
from everydepth.objectives import end_to_end
from everydepth.runs.callback import Callback
from everydepth.runs.together import several
from everydepth.stream import Criterion, ResidualStream, unwrapped
from everydepth.stream.feed import Feed, by_number, gives_batches, size_for
from everydepth.training import EveryDepth, fit

Trainer = Callable[[nn.Module, Any, Optimizer, int, Path | None], None]
"""Trains in place: `f(model, train, optimizer, steps, folder)`. It may save to `folder` and resume
from there; None if nothing is saved."""

SAVE_EVERY = 50


def train_plainly(
    stream: ResidualStream,
    data: Any,
    optimizer: Optimizer,
    steps: int,
    *,
    batch_size: int,
    seed: int,
    criterion: Criterion | None = None,
    run: Path | None = None,
    about: dict[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
) -> None:
    """`fit` the last depth at a constant learning rate; an existing `run` is resumed."""
    if steps == 0:
        return
    model = unwrapped(stream.model)
    before = model.training
    size: dict[str, Any] = {} if gives_batches(data) else {"batch_size": batch_size}
    fit(
        EveryDepth(stream, end_to_end(), criterion=criterion),
        data,
        steps=steps,
        optimizer=optimizer,
        schedule="constant",
        seed=seed,
        run=run,
        resume=run is not None,
        save_every=SAVE_EVERY,
        keep=1,
        callbacks=callbacks,
        about=about,
        progress=progress,
        **size,
    )
    model.train(before)
    if several():
        _agree(model)


@torch.no_grad()
def _agree(model: nn.Module) -> None:
    """Take batch norm statistics from the first process; parameters agree already."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def repeatable(data: Any, stream: ResidualStream, batch_size: int) -> Any:
    """Indexable data as it is; anything else as a list of batches."""
    if by_number(data, stream) is not None:
        return data
    return list(Feed(data, stream, batch_size=size_for(data, batch_size)))


def halves(
    stream: ResidualStream, train: Any, rows: int, *, batch_size: int, seed: int
) -> tuple[list[Any], list[Any]]:
    """Batches of training rows to find the direction and the step, and others to rank sites."""
    batches: list[Any] = []
    taken = 0
    numbered = by_number(train, stream)
    order = None
    if numbered is not None:
        order = torch.from_numpy(random_stream(seed, 0).permutation(len(numbered)))
    for batch in Feed(train, stream, batch_size=size_for(train, batch_size), only=order):
        batches.append(batch)
        taken += stream.rows(batch)
        if taken >= rows:
            break
    return (batches[::2], batches[1::2]) if len(batches) > 1 else (batches, batches)
