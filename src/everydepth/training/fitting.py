"""`fit`: train a network at every depth, in one process or many."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from everydepth.config import checked, filled
from everydepth.errors import SettingError
from everydepth.runs.together import failing_together
from everydepth.stream import ResidualStream, Source, check_plain, differentiating, unwrapped
from everydepth.stream.taps import replaced_forward
from everydepth.stream.text import in_tokens
from everydepth.training.callbacks import Callback
from everydepth.training.config import FitConfig, RunConfig
from everydepth.training.loader import loader_of
from everydepth.training.loop import Training
from everydepth.training.module import EveryDepth
from everydepth.training.processes import accelerator_for, start_trackers
from everydepth.training.result import FitResult, flat
from everydepth.training.scoring import Evaluator
from everydepth.training.snapshot import kept_random_state


@checked
@kept_random_state()
@failing_together()
def fit(
    net: nn.Module | ResidualStream,
    train: Source,
    valid: Source | None = None,
    config: FitConfig | None = None,
    *,
    where: RunConfig | None = None,
    callbacks: Sequence[Callback] = (),
    about: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    **settings: Any,
) -> FitResult:
    """Train an `EveryDepth` network at every depth its objective supervises.

    net: an `EveryDepth`; a model or stream is wrapped in one with the default objective.
    train, valid: rows (`everydepth.data`, a torch or Hugging Face dataset, or one large batch such
        as the tuple `(inputs, labels)`), a DataLoader, or a re-iterable of batches. With rows, a
        step takes `batch_size` of them, over all processes and accumulated pieces, so neither
        changes the result; their order depends only on `seed` and the epoch. Data that comes in
        batches has its own size, order and workers; asking for others is an error. In batches of
        `everydepth.data.Tokens`, columns that are all padding are dropped. With a `tokenizer`,
        a list of strings, one row each, or `(texts, labels)` works too.
    config, where: settings that affect the outcome, and settings that do not.
    about: JSON values to add to the run's config.
    Afterwards the network is in training mode and has no gradients; the global random states, and
    the learning rates of an optimizer you passed, are those of before.

    settings: any field of `FitConfig` and `RunConfig`: `epochs=3, lr=2e-3, run="runs/one"`.

    >>> net = ed.EveryDepth(model, ed.lpa())
    >>> done = ed.fit(net, train, valid, epochs=1, run="runs/one", progress=False)
    >>> done.stopped, (done.path / "model" / "config.json").is_file()
    ('finished', True)
    """
    asked: FitConfig
    place: RunConfig
    asked, place = filled(settings, "fit", config or FitConfig, where or RunConfig)
    if not isinstance(net, EveryDepth):
        if isinstance(net, nn.Module) and isinstance(unwrapped(net), EveryDepth):
            raise SettingError(
                f"fit got an EveryDepth inside {type(net).__name__}; pass the EveryDepth itself, "
                "fit handles processes and compilation"
            )
        net = EveryDepth(net, tokenizer=tokenizer)
    elif tokenizer is not None:
        length = net.stream.positions
        train, valid = (in_tokens(data, tokenizer, length) for data in (train, valid))
    if place.resume and place.run is None:
        raise SettingError("resume=True without run=; give the directory of the run to continue")
    if asked.rule is not None and valid is None:
        raise SettingError("early_stopping without validation data; pass valid=")
    evaluator = None
    if valid is not None:
        evaluator = Evaluator(valid, batch_size=max(asked.batch_size, 256))
    check_plain(net.model, "fit")
    net.stream.check_loaded()
    accelerator = accelerator_for(net, place.trackers, place.run)
    training = Training(
        net=net,
        accelerator=accelerator,
        loader=loader_of(
            train, net.stream, accelerator, asked, workers=place.workers, named=settings
        ),
        evaluator=evaluator,
        config=asked,
        where=place,
        callbacks=tuple(callbacks),
        about=dict(about or {}),
    )
    with ExitStack() as stack:
        stack.enter_context(differentiating())
        if place.compile:
            backend = place.compile if isinstance(place.compile, str) else "inductor"
            stack.enter_context(_compiled(net, backend))
        training.prepare()
        stack.callback(training.leave)
        training.open_run(stack)
        if place.trackers:
            try:
                start_trackers(accelerator, flat(training.describe()))
            except SettingError:
                training.discard()
                raise
            stack.callback(lambda: [tracker.finish() for tracker in accelerator.trackers])
        return training.go()


@contextmanager
def _compiled(net: EveryDepth, backend: str) -> Generator[None, None, None]:
    """Compile every block's forward inside the context; hooks stay outside the compiled code."""
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise SettingError(f"compile={backend!r}; use True or one of {', '.join(known)}")
    with ExitStack() as stack:
        for block in net.stream.blocks:
            compiled = torch.compile(block.module.forward, backend=backend)
            stack.enter_context(replaced_forward(block.module, compiled))
        yield
