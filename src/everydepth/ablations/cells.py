"""Ablation by training: one model for each (layer, c, seed), the cells of a sweep."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from everydepth.ablations.config import AblateConfig, Which
from everydepth.ablations.memorize import memorization
from everydepth.ablations.result import Ablation, Floats
from everydepth.ablations.skips import checked_layers, scaled_skip
from everydepth.errors import SettingError
from everydepth.runs.cells import cell_key, run_cells
from everydepth.runs.engine import EngineConfig
from everydepth.runs.opening import opened
from everydepth.stream import TOKEN_TASKS, as_stream
from everydepth.stream.feed import Source

Train = Callable[[nn.Module, Path | None, int], Any]
"""Trains a model in place: `train(model, folder, seed)`. A FitResult or mapping that it returns is
stored with the cell."""


@dataclass(frozen=True, kw_only=True)
class TrainedCell:
    """Trains one cell, wherever it runs. layer=None is the untouched model."""

    model: nn.Module | Callable[[int], nn.Module]
    train: Train
    score: Callable[[nn.Module], Ablation]
    which: Which
    clean: Source
    noisy: Source | None
    flipped: Any
    options: Mapping[str, Any]

    def __call__(
        self, *, layer: int | None, c: float, seed: int, folder: Path | None
    ) -> dict[str, Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.start(seed)
            if model is self.model:
                model = copy.deepcopy(model)
            where = 1 if layer is None else layer
            with scaled_skip(model, layer=where, c=c, which=self.which, **self.options):
                facts = _facts(self.train(model, folder, seed))
                scored = self.score(model)
                values = {name: float(value[0]) for name, value in scored.untouched.items()}
                if self.noisy is not None:
                    values |= self._memorized(model, scored.task)
        # Agreement with the untouched model of another run would compare runs, not skips.
        values.pop("agreement", None)
        return {
            "metrics": values,
            "samples": scored.samples,
            "model": scored.model,
            "task": scored.task,
            **facts,
        }

    def start(self, seed: int) -> nn.Module:
        """The model to start from, before it is copied."""
        return self.model if isinstance(self.model, nn.Module) else self.model(seed)

    def _memorized(self, model: nn.Module, task: str) -> dict[str, float]:
        tokens = task in TOKEN_TASKS
        shares = memorization(
            model,
            self.noisy,
            self.clean if tokens else None,
            flipped=self.flipped,
            progress=False,
            **self.options,
        )
        found = {
            "memorization": shares.memorization,
            "train_accuracy": shares.train_accuracy,
            "reached": float(shares.reached),
        }
        if shares.test_accuracy is not None:
            found["sample_accuracy"] = shares.test_accuracy
        return found


def trained_sweep(
    training: TrainedCell,
    config: AblateConfig,
    run: str | Path | None,
    where: EngineConfig,
    progress: bool,
) -> Ablation:
    """The cells of `ablate(..., train=)`. The untouched model is trained once per seed."""
    if (training.noisy is None) != (training.flipped is None):
        raise SettingError(
            "memorization needs both noisy= (the noisy training data) and flipped= (its wrong "
            "rows, from everydepth.data.flip_labels); give both or neither"
        )
    scales, seeds, which = config.scales, config.seeds, config.which
    stream = as_stream(training.start(seeds[0]), **training.options)
    chosen = checked_layers(stream, config.layers_of(stream.depth))
    for layer in chosen:  # raises before training starts if the model has no such branch
        scaled_skip(stream, layer=layer, c=0.0, which=which)
    cells = [_cell(None, 1.0, seed) for seed in seeds]
    cells += [
        _cell(layer, c, seed) for seed in seeds for layer in chosen for c in scales if c != 1.0
    ]
    asked = {"layers": chosen, "c": list(scales), "which": which, "seeds": list(seeds)}
    how: dict[str, Any] = {"where": where, "folders": True, "progress": progress}
    how["title"] = "training cells"
    if run is None:
        found = run_cells(cells, training, run=None, **how).results
    else:
        with opened(run, asked, kind="ablate") as (started, _):
            found = run_cells(cells, training, run=started, **how).results
    first = found[cell_key(cells[0])]
    names = list(first["metrics"])

    def value(layer: int | None, c: float, seed: int, name: str) -> float:
        return found[cell_key(_cell(layer, c, seed))]["metrics"][name]

    def grid(name: str) -> Floats:
        return np.array(
            [[[value(layer, c, s, name) for c in scales] for layer in chosen] for s in seeds]
        )

    outcome = Ablation.of(
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
            name: np.array([value(None, 1.0, seed, name) for seed in seeds]) for name in names
        },
    )
    if run is not None:
        outcome.save(Path(run) / "ablation")
    return outcome


def _cell(layer: int | None, c: float, seed: int) -> dict[str, Any]:
    """With c = 1, all layers share the cell of the untouched model."""
    return {"layer": None if c == 1.0 else layer, "c": c, "seed": seed}


def _facts(returned: Any) -> dict[str, Any]:
    """Epochs, steps and why training ended, if known."""
    if is_dataclass(returned):
        returned = {name: getattr(returned, name, None) for name in ("epochs", "steps", "stopped")}
    if not isinstance(returned, Mapping):
        return {}
    plain = {str(k): v for k, v in returned.items() if isinstance(v, str | int | float | bool)}
    return {"training": plain} if plain else {}
