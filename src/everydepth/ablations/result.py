"""The outcome of an ablation: one number per layer and scale, for every metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from everydepth.config import checked
from everydepth.errors import SettingError
from everydepth.results import Better, Fact, Result, Results, defined, named, provenance

Floats = NDArray[np.float64]

Mode = Literal["after", "training"]
"""A trained model changed after training, or one model trained for each change."""


class Ablation(Results, kind="ablation"):
    """Metrics with the skips of one layer scaled by `c`, for every layer and c.

    `ablation["accuracy"]` is the mean over seeds, `(layer, c)`. The metrics:

    - loss.
    - accuracy, margin (top-1 minus top-2 logit) and agreement (share of the untouched model's
      decisions kept), if classes or tokens are predicted; perplexity of language models.
    - memorization, train_accuracy and reached (1 if all training labels were fitted), with
      `train=`; sample_accuracy of language models (share of samples with all targets predicted).

    >>> ablation = ed.ablate(model, valid, c=(0.0, 1.0), progress=False)
    >>> ablation["accuracy"].shape  # layers, scales
    (3, 2)
    >>> ablation.at("accuracy", 0.0).shape  # one number per layer, its skips removed
    (3,)
    """

    mode = Fact[Mode]()
    """How it was measured."""
    which = Fact[str]()
    """Which skips were scaled: "both", or those of one kind of branch."""
    layers = Fact[tuple[int, ...]](tuple)
    """The layers, from 1."""
    c = Fact[tuple[float, ...]](tuple)
    """The factors on the skip."""
    seeds = Fact[tuple[int, ...]](tuple)
    """The seeds, one model per seed."""

    @classmethod
    def of(
        cls,
        *,
        mode: Mode,
        which: str,
        layers: Sequence[int],
        c: Sequence[float],
        seeds: Sequence[int],
        runs: Mapping[str, Floats],
        untouched: Mapping[str, Floats],
        **facts: Any,
    ) -> Ablation:
        """runs: by metric, `(seed, layer, c)`. untouched: by metric, `(seed,)`."""
        found = [
            _measurement(name, values, untouched[name], layers, c)
            for name, values in sorted(runs.items(), key=lambda item: _rank(item[0]))
        ]
        about = provenance(mode=mode, which=which, layers=layers, c=c, seeds=seeds, **facts)
        return cls(results=named(*found), about=about)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics."""
        return tuple(self.results)

    @property
    def runs(self) -> dict[str, Floats]:
        """By metric, `(seed, layer, c)`: every model on its own."""
        return {name: np.asarray(found.arrays["runs"]) for name, found in self.results.items()}

    @property
    def untouched(self) -> dict[str, Floats]:
        """By metric, `(seed,)`: the models with their skips."""
        return {name: np.asarray(found.arrays["untouched"]) for name, found in self.results.items()}

    @checked
    def at(self, metric: str, c: float) -> Floats:
        """One number per layer, at one scale."""
        if c not in self.c:
            raise SettingError(f"c={c}, but this ablation has {', '.join(map(str, self.c))}")
        return self[metric][:, self.c.index(c)]


_WORDS: Mapping[str, tuple[str, Better | None, str]] = {
    "accuracy": ("share", "higher", "Share of correct predictions"),
    "perplexity": ("", "lower", "Perplexity"),
    "loss": ("nat", "lower", "Mean loss"),
    "margin": ("", None, "Top-1 minus top-2 logit"),
    "agreement": ("share", "higher", "Share of the untouched model's decisions that are kept"),
    "memorization": ("share", None, "Share of wrong training labels that are predicted"),
    "train_accuracy": ("share", "higher", "Share of training labels that are predicted"),
    "sample_accuracy": ("share", "higher", "Share of samples with all targets predicted"),
    "reached": ("share", "higher", "Share of models that fitted every training label"),
}


def _rank(metric: str) -> int:
    """The order of display, the most important first."""
    order = list(_WORDS)
    return order.index(metric) if metric in order else len(order)


def _measurement(
    name: str, runs: Floats, untouched: Floats, layers: Sequence[int], c: Sequence[float]
) -> Result:
    unit, better, about = _WORDS.get(name, ("", None, name.replace("_", " ").capitalize()))
    spread = {"value_low": runs.min(0), "value_high": runs.max(0)} if len(runs) > 1 else {}
    return Result(
        name=name,
        kind="family",
        axis="layer",
        series=("value",),
        arrays={
            "layer": np.array(layers),
            "columns": np.array(c, dtype=np.float64),
            "value": defined(runs.mean(0)),
            "runs": runs,
            "untouched": untouched,
            **spread,
        },
        labels={
            "layer": "layer with scaled skips",
            "columns": "c =",
            "value": name.replace("_", " "),
        },
        about=f"{about} with the skips of one layer multiplied by c; 0 removes them.",
        unit=unit,
        better=better,
        section="blocks",
        note=f"untouched: {float(untouched.mean()):.4g}",
    )
