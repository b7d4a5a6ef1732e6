"""Ablate a trained model over layers and scales, sharing the blocks that do not change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everydepth.ablations.cells import Train, TrainedCell, trained_sweep
from everydepth.ablations.config import AblateConfig
from everydepth.ablations.memorize import Flipped
from everydepth.ablations.result import Ablation, Floats
from everydepth.ablations.skips import ScaledSkip, checked_layers
from everydepth.ablations.taps import margins
from everydepth.config import checked, parted
from everydepth.errors import NonFiniteError, SettingError
from everydepth.runs.engine import EngineConfig
from everydepth.stream import (
    WORD_TASKS,
    ResidualStream,
    Targets,
    as_stream,
    at_least_float32,
    evaluating,
    has_labels,
    no_labels,
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
    """Measure a model with the skips of one layer scaled, for every layer and scale.

    By default a trained model is measured; blocks below the changed one run once per batch. With
    `train=`, one model is trained for each (layer, c, seed), as in the paper:

        def train(model, folder, seed):
            net = ed.EveryDepth(model, ed.end_to_end())
            return ed.fit(net, rows, epochs=70, seed=seed, run=folder, resume=True,
                          callbacks=[UntilAccuracy(rows)])

    model: with `train=`, the model to start from, or a function that builds one from a seed.
    data: the data to measure on, with labels.
    config, where, settings: an `AblateConfig`, an `EngineConfig`, or their fields by name:
        `layers=`, `c=`, `which=`; with `train=` also `seeds=` and `engine=`, as in `sweep`. Other
        settings go to `as_stream`.
    train: called with the model whose skip is scaled, a folder of its own, and the seed.
    run: with `train=`, a directory; cells finished there are not trained again.
    noisy, flipped: with `train=`, the noisy training data and its wrong rows, to report
        memorization, training accuracy, and whether it reached 100 %.

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
        training = TrainedCell(
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
            "per cell"
        )
    given: dict[str, Any] = {"run": run, "noisy": noisy, "flipped": flipped}
    given["seeds"] = None if asked.seeds == AblateConfig().seeds else asked.seeds
    given["engine"] = None if place == EngineConfig() else place.engine
    for name, value in given.items():
        if value is not None:
            raise SettingError(f"{name}= needs train=; leave it out, or give train= as well")
    return _scored(as_stream(model, **options), data, asked, progress=progress)


def _scored(
    stream: ResidualStream, data: Source, config: AblateConfig, *, progress: bool
) -> Ablation:
    """The ablation of a trained model."""
    if stream.task == "embedding":
        raise SettingError(
            f"{stream.name} produces embeddings, which have no labels or decisions to score; use "
            "scaled_skip and compare them yourself"
        )
    scales, which = config.scales, config.which
    chosen = checked_layers(stream, config.layers_of(stream.depth))
    skips = {
        (layer, scale): ScaledSkip(stream, [layer], scale, which)
        for layer in chosen
        for scale in scales
    }
    size, most = config.batch_size, config.max_samples
    feed = Feed(data, stream, batch_size=size, max_samples=most, again=True)
    sums: dict[Any, _Sums] = {key: _Sums() for key in (None, *skips)}
    samples = 0
    with torch.no_grad(), evaluating(stream):
        for batch in feed.shown("ablating", progress):
            samples += _sweep(stream, batch, skips, sums)
    if sums[None].rows == 0:
        raise no_labels()
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
    # Cursors are immutable: every change of layer l + 1 starts from the one at depth l.
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
                    f"with the skip of layer {layer} scaled by {scale:g}, predictions of "
                    f"{stream.name} are NaN or infinite; use a scale closer to 1, or a wider dtype",
                    layer,
                )
        sums[layer, scale].add(z, targets, decisions, stream.task)
    return targets.samples


class _Sums:
    """Sums over rows of the metrics of one cell."""

    def __init__(self) -> None:
        self.rows = 0
        self.totals: dict[str, float] = {}

    def add(self, z: Tensor, targets: Targets, decisions: Tensor, task: str) -> None:
        values: dict[str, Tensor] = {}
        if targets.labels is not None:
            values["loss"] = targets.losses(z)
        if task != "regression" and z.shape[-1] > 1:
            if targets.labels is not None:
                values["accuracy"] = targets.hits(z)
            values["margin"] = margins(z)
            values["agreement"] = z.argmax(-1) == decisions
        self.rows += len(z)
        for name, value in values.items():
            self.totals[name] = self.totals.get(name, 0.0) + float(value.double().sum())

    def metrics(self, task: str) -> dict[str, float]:
        found = {name: total / self.rows for name, total in self.totals.items()}
        if task in WORD_TASKS and "loss" in found:
            # Beyond e^700 a float64 overflows.
            found["perplexity"] = math.exp(min(found["loss"], 700.0))
        return found
