"""Plain training of a grown model, by one process or several, that can be cut off anywhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from rich.progress import track
from torch import nn
from torch.optim import Optimizer

from everydepth.data import Rows, batches
from everydepth.data.feeding import Feed
from everydepth.errors import NonFiniteError
from everydepth.growth.losses import beside, row_losses
from everydepth.growth.optimizers import load_named_state, named_state
from everydepth.runs import Run
from everydepth.stream import Criterion, ResidualStream, unwrapped
from everydepth.stream.rows import select_rows

Trainer = Callable[[nn.Module, Any, Optimizer, int, Path | None], None]
"""Trains in place: `f(model, train, optimizer, steps, folder)`. `folder` is its own, to save in and
to resume from; None where nothing is saved."""

SAVE_EVERY = 50


def fit_plainly(
    stream: ResidualStream,
    data: Any,
    optimizer: Optimizer,
    steps: int,
    *,
    batch_size: int = 32,
    seed: int = 0,
    criterion: Criterion | None = None,
    run: Run | None = None,
    save_every: int = SAVE_EVERY,
    progress: bool = False,
) -> float:
    """Steps of plain training; with several processes each takes its part of every batch.

    Returns the mean of this process's losses, one a step.

    run: saved into every `save_every` steps, and continued if it has a checkpoint. Order and
    dropout depend on the seed and the step alone, so that a training that was cut off ends with
    the same bits.
    """
    model = unwrapped(stream.model)
    before = model.training
    model.train()
    rank, world = (dist.get_rank(), processes()) if processes() > 1 else (0, 1)
    done = 0 if run is None else _restored(run, model, optimizer)
    quiet = not (progress and sys.stderr.isatty())
    todo = track(range(done, steps), "training", disable=quiet, transient=True)
    fed = _endless(stream, data, batch_size, seed, done)
    seen: list[float] = []
    with torch.random.fork_rng(devices=[]):
        for step, batch in zip(todo, fed):  # noqa: B905 - endless
            torch.manual_seed((seed * 1_000_003 + step) * world + rank)
            size = stream.rows(batch)
            part = (
                batch if world == 1 else select_rows(batch, torch.arange(rank, size, world), size)
            )
            output = stream.call(stream.arguments(part, None))
            logits = stream.prediction(output)
            losses, counts = row_losses(stream, logits, part, criterion, beside(output))
            total = counts.sum()
            if world > 1:
                dist.all_reduce(total)
            loss = losses.sum() / total
            seen.append(loss.item() * world)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if not math.isfinite(seen[-1]):
                raise NonFiniteError(
                    f"the loss is {loss.item()} at step {step} of training the grown model; use a "
                    "lower lr",
                    stream.depth,
                )
            if world > 1:
                _sum_gradients(model)
            optimizer.step()
            if (step + 1) % save_every == 0 or step + 1 == steps:
                if world > 1:
                    _agree(model, world)
                if run is not None and is_main():
                    parts = {
                        "model": model.state_dict(),
                        "optimizer": named_state(optimizer, model),
                    }
                    run.save_checkpoint(step + 1, parts, {}, keep=1)
    model.train(before)
    return sum(seen) / max(len(seen), 1)


def _restored(run: Run, model: nn.Module, optimizer: Optimizer) -> int:
    """The step that is saved, with model and optimizer as they were; 0 if none is."""
    step = run.latest()
    if step is None:
        return 0
    saved = run.checkpoint(step)
    model.load_state_dict(saved.load("model"))
    load_named_state(optimizer, model, saved.load("optimizer"))
    return step


def _endless(
    stream: ResidualStream, data: Any, batch_size: int, seed: int, done: int
) -> Iterator[Any]:
    """Epoch after epoch, from the batch after `done` of them on."""
    source: Any = data
    if isinstance(data, Rows):
        source = batches(data, batch_size, shuffle=True, seed=seed)
        source.set_epoch(done // len(source))
    feed = Feed(source, stream)
    if done:
        yield from islice(feed, done % cast(int, feed.batches), None)
    while True:
        yield from feed


def _sum_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


@torch.no_grad()
def _agree(model: nn.Module, world: int) -> None:
    """Statistics of batch norms are averaged; parameters are the same already, to the last bit."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer.div_(world)
    for parameter in model.parameters():
        dist.broadcast(parameter, 0)


def processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_main() -> bool:
    return processes() == 1 or dist.get_rank() == 0


def wait_for_all() -> None:
    if processes() > 1:
        dist.barrier()
