"""Plain training of a grown model, by `fit`, and the data that growing goes through many times."""

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
"""Trains in place: `f(model, train, optimizer, steps, folder)`. `folder` is its own, to save in and
to resume from; None where nothing is saved."""

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
    """`fit` on the last depth at a constant rate; `run` is continued exactly where it was."""
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
    """Statistics of batch norms are those of the first process; parameters are the same already."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def repeatable(data: Any, stream: ResidualStream, batch_size: int) -> Any:
    """Rows by number as they are; anything else as a list of batches."""
    if by_number(data, stream) is not None:
        return data
    return list(Feed(data, stream, batch_size=size_for(data, batch_size)))


def halves(
    stream: ResidualStream, train: Any, rows: int, *, batch_size: int, seed: int
) -> tuple[list[Any], list[Any]]:
    """Batches of training rows for the direction and the step, and others to rank sites by."""
    found: list[Any] = []
    seen = 0
    numbered = by_number(train, stream)
    order = None
    if numbered is not None:
        order = torch.from_numpy(random_stream(seed, 0).permutation(len(numbered)))
    for batch in Feed(train, stream, batch_size=size_for(train, batch_size), only=order):
        found.append(batch)
        seen += stream.rows(batch)
        if seen >= rows:
            break
    return (found[::2], found[1::2]) if len(found) > 1 else (found, found)
