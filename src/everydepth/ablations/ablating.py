"""The sweep over layers and scales on a trained model, sharing what does not change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everydepth.ablations.cells import Train, Training, trained_sweep
from everydepth.ablations.config import AblateConfig
from everydepth.ablations.memorize import Flipped
from everydepth.ablations.result import Ablation, Floats
from everydepth.ablations.scores import margins
from everydepth.ablations.skips import (
    ScaledSkip,
    checked_layers,
)
from everydepth.config import checked, parted
from everydepth.errors import NonFiniteError, SettingError
from everydepth.runs.engine import EngineConfig
from everydepth.stream import (
    ResidualStream,
    Targets,
    as_stream,
    at_least_float32,
    evaluating,
    has_labels,
    nothing_asked,
    unwrapped,
)
from everydepth.stream.feed import Feed, Source
from everydepth.stream.states import are_finite


@checked
def ablate(
    model: nn.Module | ResidualStream | Callable[[int], nn.Module],
    data: Source,
    *,
    config: AblateConfig | None = None,
    train: Train | None = None,
    run: str | Path | None = None,
    noisy: Source | None = None,
    flipped: Flipped | None = None,
    where: EngineConfig | None = None,
    progress: bool = True,
    **settings: Any,
) -> Ablation:
    """What becomes of a model when the skips of one layer are scaled, for every layer and scale.

    On a trained model (the default): blocks below the changed one are run once a batch and shared.
    With `train=`, one model is trained for each (layer, c, seed), as in the paper:

        def train(model, folder, seed):
            net = ed.EveryDepth(model, ed.end_to_end())
            return ed.fit(net, rows, epochs=70, seed=seed, run=folder, resume=True,
                          callbacks=[UntilAccuracy(rows)])

    config, where, settings: an `AblateConfig`, an `EngineConfig`, and their fields by name:
        `layers=`, `c=`, `which=`; with `train=` also `seeds=` and `engine=`, as in `sweep`. What
        else there is goes to `as_stream`.
    data: what is scored, with labels. model: with `train=`, a model that every training starts
        from, or a function of the seed that builds one.
    train: gets the model with its skip scaled, a folder of its own, and the seed.
    run: with `train=`, a directory; cells that are finished there are not trained again.
    noisy, flipped: with `train=`, the training data with its wrong labels and which they are, to
        report memorization, training accuracy, and whether 100 % was reached.

    >>> ablation = ed.ablate(model, test, c=(0.0, 0.5, 1.0), progress=False)
    >>> print(ablation.table("accuracy"))
    Accuracy
    layer   c = 0  c = 0.5   c = 1
    ...
    >>> bool((ablation.at("accuracy", 1.0) == ablation.untouched["accuracy"]).all())
    True
    """
    asked: AblateConfig
    place: EngineConfig
    (asked, place), options = parted(
        settings, "ablate", config or AblateConfig, where or EngineConfig
    )
    if train is not None:
        if isinstance(model, ResidualStream):
            model, options = unwrapped(model.model), dict(model.options)
        alone = replace(asked, layers=1, c=1.0)
        training = Training(
            model=model,
            train=train,
            score=lambda m: _scored(as_stream(m, **options), data, alone, progress=False),
            which=asked.which,
            clean=data,
            noisy=noisy,
            flipped=flipped,
            options=options,
        )
        return trained_sweep(training, asked, run, place, progress)
    if not isinstance(model, nn.Module | ResidualStream):
        raise SettingError(
            f"model is {type(model).__name__}; pass a trained model, or give train= to train one "
            "for each cell"
        )
    given: dict[str, Any] = {"run": run, "noisy": noisy, "flipped": flipped}
    given["seeds"] = None if asked.seeds == AblateConfig().seeds else asked.seeds
    given["engine"] = None if place == EngineConfig() else place.engine
    for name, value in given.items():
        if value is not None:
            raise SettingError(f"{name}= belongs to the mode with train=; leave it out, or give it")
    return _scored(as_stream(model, **options), data, asked, progress=progress)


def _scored(
    stream: ResidualStream, data: Source, config: AblateConfig, *, progress: bool
) -> Ablation:
    """The ablation of a model as it is."""
    if stream.task == "embedding":
        raise SettingError(
            f"{stream.name} gives embeddings, which have neither labels nor decisions to score; "
            "use scaled_skip and compare them yourself"
        )
    scales, which = config.scales, config.which
    chosen = checked_layers(stream, config.layers_of(stream.depth))
    skips = {
        (layer, scale): ScaledSkip(stream, [layer], scale, which)
        for layer in chosen
        for scale in scales
    }
    feed = Feed(
        data,
        stream,
        batch_size=config.batch_size,
        max_samples=config.max_samples,
        again=True,
    )
    sums: dict[Any, _Sums] = {key: _Sums() for key in (None, *skips)}
    samples = 0
    with torch.no_grad(), evaluating(unwrapped(stream.model)):
        for batch in feed.shown("ablating", progress):
            samples += _sweep(stream, batch, skips, sums)
    if sums[None].rows == 0:
        raise nothing_asked()
    metrics = sums[None].metrics(stream.task)
    found = {key: one.metrics(stream.task) for key, one in sums.items()}

    def grid(name: str) -> Floats:
        return np.array([[[found[layer, s][name] for s in scales] for layer in chosen]])

    return Ablation.of(
        model=stream.name,
        task=stream.task,
        mode="after",
        which=which,
        layers=tuple(chosen),
        c=tuple(scales),
        seeds=(0,),
        samples=samples,
        runs={name: grid(name) for name in metrics},
        untouched={name: np.array([value]) for name, value in metrics.items()},
    )


def _sweep(
    stream: ResidualStream,
    batch: Mapping[str, Any],
    skips: Mapping[tuple[int, float], ScaledSkip],
    sums: Mapping[Any, _Sums],
) -> int:
    """One batch through every cell; returns its number of samples."""
    # Cursors are values: the one at depth l is where every change of layer l + 1 starts.
    cursors = [stream.start(batch)]
    for _ in range(stream.depth):
        cursors.append(stream.step(cursors[-1]))
    logits = stream.logits(cursors[-1])
    if has_labels(stream, batch) and stream.task != "detection":
        targets = Targets.of(stream, batch, weighted=False)
    else:
        targets = Targets.every(stream, batch, logits)
    plain = at_least_float32(targets.pick(logits))
    if not bool(are_finite(plain).all()):
        stream.observe(batch).check_predictions()
    decisions = plain.argmax(-1)
    sums[None].add(plain, targets, decisions, stream.task)
    for (layer, scale), skip in skips.items():
        if scale == 1.0:
            z = plain
        else:
            with skip:
                changed = stream.step(cursors[layer - 1])
            z = at_least_float32(targets.pick(stream.logits(stream.advance(changed))))
            if not bool(are_finite(z).all()):
                raise NonFiniteError(
                    f"with the skip of layer {layer} times {scale:g}, predictions of {stream.name} "
                    "are NaN or infinite; use a scale nearer to 1, or a wider number format",
                    layer,
                )
        sums[layer, scale].add(z, targets, decisions, stream.task)
    return targets.samples


class _Sums:
    """Sums over rows of everything one cell reports."""

    def __init__(self) -> None:
        self.rows = 0
        self.totals: dict[str, float] = {}

    def add(self, z: Tensor, targets: Targets, decisions: Tensor, task: str) -> None:
        values: dict[str, Tensor] = {}
        if targets.labels is not None:
            values["loss"] = targets.losses(z)
        if task != "regression" and z.shape[-1] > 1:
            top = z.argmax(-1)
            if targets.labels is not None:
                values["accuracy"] = targets.hits(z)
            values["margin"] = margins(z)
            values["agreement"] = top == decisions
        self.rows += len(z)
        for name, value in values.items():
            self.totals[name] = self.totals.get(name, 0.0) + float(value.double().sum())

    def metrics(self, task: str) -> dict[str, float]:
        found = {name: total / self.rows for name, total in self.totals.items()}
        if task in ("causal_lm", "masked_lm") and "loss" in found:
            # Beyond e^700 a float64 overflows.
            found["perplexity"] = math.exp(min(found["loss"], 700.0))
        return found
