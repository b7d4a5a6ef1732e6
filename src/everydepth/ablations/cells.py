"""One model trained for each (layer, c, seed), each in a run directory of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everydepth.ablations.memorize import memorization
from everydepth.ablations.progress import shown
from everydepth.ablations.result import Ablation, Floats
from everydepth.ablations.skips import Which, checked_layers, scaled_skip
from everydepth.data import NoisyLabels
from everydepth.data.feeding import Source
from everydepth.errors import SettingError
from everydepth.runs import Run
from everydepth.runs.engine import Engine, check_engine, each
from everydepth.stream import as_stream

Train = Callable[[nn.Module, Path | None, int], Any]
"""Trains a model in place: `train(model, folder, seed)`. What it returns (a FitResult, a mapping)
is kept as facts."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training. layer None: the untouched model."""

    layer: int | None
    c: float
    seed: int

    @property
    def name(self) -> str:
        where = "untouched" if self.layer is None else f"layer-{self.layer:02d}-c-{self.c:g}"
        return f"{where}-seed-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class _Job:
    """All that one cell needs, wherever it runs."""

    model: nn.Module | Callable[[int], nn.Module]
    train: Train
    score: Callable[[nn.Module], Ablation]
    which: Which
    run: Path | None
    clean: Source
    noisy: Source | None
    flipped: Any
    options: Mapping[str, Any]

    def __call__(self, cell: Cell) -> dict[str, Any]:
        folder = None if self.run is None else self.run / "cells" / cell.name
        own: Run | None = None
        if folder is not None:
            config = {"layer": cell.layer, "c": cell.c, "seed": cell.seed, "which": self.which}
            if Run.exists(folder):
                own = Run.open(folder)
                own.check_config(config)
                if own.finished:
                    return own.results()
            else:
                own = Run.create(folder, config, kind="ablation cell")
        torch.manual_seed(cell.seed)
        if isinstance(self.model, nn.Module):
            model = copy.deepcopy(self.model)
        else:
            model = self.model(cell.seed)
        layer = 1 if cell.layer is None else cell.layer
        skip = scaled_skip(model, layer=layer, c=cell.c, which=self.which, **self.options)
        with skip:
            inner = None if folder is None else folder / "training"
            facts = _facts(self.train(model, inner, cell.seed))
            scored = self.score(model)
            values = {name: float(value[0]) for name, value in scored.untouched.items()}
            # Agreement with an untouched model of another training would compare trainings.
            values.pop("agreement", None)
            if self.noisy is not None:
                tokens = scored.task in ("causal_lm", "masked_lm")
                kept = memorization(
                    model,
                    self.noisy,
                    self.clean if tokens else None,
                    flipped=self.flipped,
                    progress=False,
                    **self.options,
                )
                values |= {
                    "memorization": kept.memorization,
                    "train_accuracy": kept.train_accuracy,
                    "reached": float(kept.reached),
                }
                if kept.test_accuracy is not None:
                    values["sample_accuracy"] = kept.test_accuracy
        results = {
            "metrics": values,
            "samples": scored.samples,
            "model": scored.model,
            "task": scored.task,
            **facts,
        }
        if own is not None:
            own.write_results(results)
        return results


def trained_sweep(
    model: nn.Module | Callable[[int], nn.Module],
    train: Train,
    score: Callable[[nn.Module], Ablation],
    *,
    layers: int | Sequence[int] | None,
    scales: Sequence[float],
    which: Which,
    seeds: Sequence[int],
    run: str | Path | None,
    clean: Source,
    noisy: Source | None,
    flipped: NoisyLabels | Tensor | Sequence[int] | None,
    engine: Engine,
    progress: bool,
    options: Mapping[str, Any],
) -> Ablation:
    """The cells of `ablate(..., train=)`. The untouched model is trained once a seed."""
    check_engine(engine)
    if not seeds or len(set(seeds)) < len(seeds):
        raise SettingError(f"seeds={list(seeds)}; give each seed once, at least one")
    if (noisy is None) != (flipped is None):
        raise SettingError(
            "memorization needs both noisy= (the training data with its wrong labels) and flipped= "
            "(which they are, from everydepth.data.flip_labels); give both or neither"
        )
    stream = as_stream(model if isinstance(model, nn.Module) else model(seeds[0]), **options)
    chosen = checked_layers(stream, range(1, stream.depth + 1) if layers is None else layers)
    for layer in chosen:  # a kind that the family lacks is said before the first training
        scaled_skip(stream, layer=layer, c=0.0, which=which)
    cells = [Cell(layer=None, c=1.0, seed=seed) for seed in seeds]
    cells += [
        Cell(layer=layer, c=c, seed=seed)
        for seed in seeds
        for layer in chosen
        for c in scales
        if c != 1.0
    ]
    folder = None if run is None else Path(run)
    if folder is not None:
        config = {"layers": chosen, "c": list(scales), "which": which, "seeds": list(seeds)}
        if Run.exists(folder):
            Run.open(folder).check_config(config)
        else:
            Run.create(folder, config, kind="ablate")
    job = _Job(
        model=model,
        train=train,
        score=score,
        which=which,
        run=folder,
        clean=clean,
        noisy=noisy,
        flipped=flipped,
        options=options,
    )
    found = dict(shown(each(job, cells, engine), "training cells", len(cells), progress))
    first = found[cells[0]]
    names = list(first["metrics"])

    def value(layer: int, c: float, seed: int, name: str) -> float:
        cell = Cell(layer=None if c == 1.0 else layer, c=c, seed=seed)
        return found[cell]["metrics"][name]

    def grid(name: str) -> Floats:
        return np.array(
            [[[value(layer, c, s, name) for c in scales] for layer in chosen] for s in seeds]
        )

    outcome = Ablation(
        model=first["model"],
        task=first["task"],
        mode="training",
        which=which,
        layers=tuple(chosen),
        c=tuple(scales),
        seeds=tuple(seeds),
        samples=first["samples"],
        runs={name: grid(name) for name in names},
        untouched={
            name: np.array([found[cell]["metrics"][name] for cell in cells[: len(seeds)]])
            for name in names
        },
    )
    if folder is not None:
        Run.open(folder).write_results({"ablation": outcome.to_json()})
    return outcome


def _facts(returned: Any) -> dict[str, Any]:
    """How the training went, as far as it is known: epochs, steps and why it ended."""
    if is_dataclass(returned):
        returned = {name: getattr(returned, name, None) for name in ("epochs", "steps", "stopped")}
    if not isinstance(returned, Mapping):
        return {}
    plain = {str(k): v for k, v in returned.items() if isinstance(v, str | int | float | bool)}
    return {"training": plain} if plain else {}
