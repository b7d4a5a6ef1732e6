"""The built-in loop: every depth trained, nothing lost, on one process or many."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everydepth.errors import SettingError
from everydepth.stream.taps import replaced_forward
from everydepth.training.callbacks import Callback
from everydepth.training.loader import TrainData, loader_of
from everydepth.training.loop import Training
from everydepth.training.module import EveryDepth
from everydepth.training.processes import accelerator_for, start_trackers
from everydepth.training.result import FitResult, flat
from everydepth.training.schedules import Schedule
from everydepth.training.scoring import Evaluator
from everydepth.training.settings import (
    EarlyStopping,
    Settings,
    described,
)


def fit(
    net: nn.Module,
    train: TrainData,
    valid: TrainData | None = None,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int = 32,
    shuffle: bool = True,
    optimizer: str | Optimizer = "adamw",
    lr: float | None = None,
    weight_decay: float | None = None,
    schedule: str | Schedule | LRScheduler = "cosine",
    warmup: float | int = 0,
    grad_accumulation: int = 1,
    clip: float | None = None,
    precision: str | None = None,
    compile: bool | str = False,  # noqa: A002 - the name everybody looks for
    validate_every: int | None = None,
    early_stopping: EarlyStopping | int | None = None,
    run: str | Path | None = None,
    resume: bool = False,
    save_every: int | None = None,
    keep: int = 2,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
    workers: int = 0,
    log_every: int = 10,
    progress: bool = True,
    trackers: str | Sequence[Any] = (),
    about: Mapping[str, Any] | None = None,
) -> FitResult:
    """Train an `EveryDepth` network at every depth its objective supervises.

    train, valid: a Dataset of dictionaries, a DataLoader, or batches that can be iterated again
        and again. Of a Dataset `batch_size` rows make one optimizer step, over all processes and
        accumulated pieces together, so neither changes the result; the order is a function of
        `seed` and the epoch.
    epochs, steps: one of the two.
    optimizer: a name or an optimizer of `net.parameters()`; lr and weight_decay have defaults by
        name (AdamW .001 and .01, Adam .001 and 0, SGD with momentum .9 .1 and 1e-4).
    schedule: a name, a `Schedule`, or a torch scheduler of the given optimizer, stepped every step.
    warmup: a linear rise of the learning rate over so many steps; below 1, over that share.
    grad_accumulation: cut each batch into so many pieces, to save memory.
    clip: the largest norm of the gradient.
    precision: "fp32" or "bf16" (autocast); by default what `accelerate launch` says.
    compile: compile every block with `torch.compile`; a string names the backend.
    validate_every: steps; by default at the end of each epoch. The last step is always validated.
    early_stopping: an `EarlyStopping`, or its patience in validations.
    run: a directory for config, metrics, checkpoints and results. Without it nothing is written.
    resume: continue the run in that directory exactly where its last checkpoint left off, or start
        it if there is none.
    save_every: steps between checkpoints; by default at the end of each epoch.
    keep: how many of the last checkpoints stay, beside the best.
    workers: processes that load rows of a Dataset.
    trackers: "tensorboard", "wandb", "mlflow", or trackers of accelerate.
    about: more to write into the run's config, as JSON values.

    >>> net = ed.EveryDepth(model, ed.lpa())
    >>> done = ed.fit(net, train, valid, epochs=1, run="runs/one", progress=False)
    >>> done.stopped, (done.path / "model" / "config.json").is_file()
    ('finished', True)
    """
    patience = early_stopping
    settings = Settings(
        epochs=epochs,
        steps=steps,
        batch_size=batch_size,
        optimizer=described(optimizer),
        lr=lr,
        schedule=described(schedule),
        warmup=warmup,
        weight_decay=weight_decay,
        grad_accumulation=grad_accumulation,
        clip=clip,
        precision=precision,
        validate_every=validate_every,
        early_stopping=EarlyStopping(patience=patience) if isinstance(patience, int) else patience,
        shuffle=shuffle,
        seed=seed,
    )
    if not isinstance(net, EveryDepth):
        raise SettingError(
            f"fit needs an EveryDepth, got {type(net).__name__}; wrap it: EveryDepth(model)"
        )
    if resume and run is None:
        raise SettingError("resume=True without run=; give the directory of the run to continue")
    if settings.early_stopping is not None and valid is None:
        raise SettingError("early_stopping without validation data; pass valid=")
    accelerator = accelerator_for(net, trackers, run)
    loader = loader_of(
        train, accelerator, batch_size=batch_size, seed=seed, workers=workers, shuffle=shuffle
    )
    training = Training(
        net=net,
        accelerator=accelerator,
        loader=loader,
        evaluator=None if valid is None else Evaluator(valid, batch_size=max(batch_size, 256)),
        settings=settings,
        callbacks=tuple(callbacks),
        save_every=save_every,
        keep=keep,
        log_every=log_every,
        about=dict(about or {}),
    )
    with ExitStack() as stack:
        if compile:
            stack.enter_context(_compiled(net, compile if isinstance(compile, str) else "inductor"))
        training.prepare(optimizer, schedule)
        training.open_run(run, resume)
        if trackers:
            start_trackers(accelerator, flat(training.config()))
            stack.callback(lambda: [tracker.finish() for tracker in accelerator.trackers])
        return training.go(progress=progress)


@contextmanager
def _compiled(net: EveryDepth, backend: str) -> Generator[None, None, None]:
    """Compile the forward of every block; hooks stay outside, and all is undone at the end."""
    with ExitStack() as stack:
        for block in net.stream.blocks:
            compiled = torch.compile(block.module.forward, backend=backend)
            stack.enter_context(replaced_forward(block.module, compiled))
        yield
