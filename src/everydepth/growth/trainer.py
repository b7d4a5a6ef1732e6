"""Plain training of a model that was grown: the loop of `fit`, with an optimizer that was carried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from everydepth.objectives import end_to_end
from everydepth.runs.callback import Callback
from everydepth.runs.together import several
from everydepth.stream import Criterion, ResidualStream, unwrapped
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
    criterion: Criterion | None,
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
    fit(
        EveryDepth(model, end_to_end(), criterion=criterion, **stream.options),
        data,
        steps=steps,
        batch_size=batch_size,
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
    )
    model.train(before)
    if several():
        _agree(model)


@torch.no_grad()
def _agree(model: nn.Module) -> None:
    """Statistics of batch norms are those of the first process; parameters are the same already."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
