"""What an ablation found: one number per layer and scale, for every metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from everydepth.errors import SettingError
from everydepth.results import Better, Result, Results, defined, named, provenance

Floats = NDArray[np.float64]

Mode = Literal["after", "training"]
"""A trained model, changed afterwards; or one model trained for each change."""


class Ablation(Results, kind="ablation"):
    """Metrics after the skips of one layer were scaled by `c`, for every layer and c.

    `ablation["accuracy"]` is the mean over seeds, `(layer, c)`. Metrics: loss, and where classes or
    tokens are predicted accuracy, margin (top-1 minus top-2 logit), agreement (share of the
    untouched model's decisions kept), perplexity of language models; of trained models also
    memorization, train_accuracy, reached (1 where all training labels were fitted) and, of language
    models, sample_accuracy (share of samples all of whose targets are predicted).

    >>> ablation = ed.ablate(model, valid, c=(0.0, 1.0), progress=False)
    >>> ablation["accuracy"].shape  # layers, scales
    (3, 2)
    >>> ablation.at("accuracy", 0.0).shape  # one number per layer, its skips removed
    (3,)
    """

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
        """runs: by metric, `(seed, layer, c)`. untouched: by metric, `(seed,)`: with its skips."""
        found = [
            _measurement(name, values, untouched[name], layers, c)
            for name, values in sorted(runs.items(), key=lambda item: _rank(item[0]))
        ]
        about = provenance(mode=mode, which=which, layers=layers, c=c, seeds=seeds, **facts)
        return cls(results=named(*found), about=about)

    @property
    def mode(self) -> Mode:
        """How it was measured."""
        return self.about["mode"]

    @property
    def which(self) -> str:
        """Whose skips were scaled: "both", or those of one kind of branch."""
        return self.about["which"]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, from 1."""
        return tuple(self.about["layers"])

    @property
    def c(self) -> tuple[float, ...]:
        """The factors on the skip."""
        return tuple(self.about["c"])

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds, one model each."""
        return tuple(self.about["seeds"])

    @property
    def metrics(self) -> tuple[str, ...]:
        """What was measured."""
        return tuple(self.results)

    @property
    def runs(self) -> dict[str, Floats]:
        """By metric `(seed, layer, c)`: every model by itself."""
        return {name: np.asarray(found.arrays["runs"]) for name, found in self.results.items()}

    @property
    def untouched(self) -> dict[str, Floats]:
        """By metric `(seed,)`: the models with their skips."""
        return {name: np.asarray(found.arrays["untouched"]) for name, found in self.results.items()}

    def at(self, metric: str, c: float) -> Floats:
        """One number per layer, at one scale."""
        if c not in self.c:
            raise SettingError(f"c={c}, but this ablation has {', '.join(map(str, self.c))}")
        return self[metric][:, self.c.index(c)]


_WORDS: Mapping[str, tuple[str, Better | None, str]] = {
    "accuracy": ("share", "higher", "Share of right predictions"),
    "perplexity": ("", "lower", "Perplexity"),
    "loss": ("nat", "lower", "Mean loss"),
    "margin": ("", None, "Top-1 minus top-2 logit"),
    "agreement": ("share", "higher", "Share of the untouched model's decisions that are kept"),
    "memorization": ("share", None, "Share of wrong training labels that are predicted"),
    "train_accuracy": ("share", "higher", "Share of training labels that are predicted"),
    "sample_accuracy": ("share", "higher", "Share of samples all of whose targets are predicted"),
    "reached": ("share", "higher", "Share of models that fitted every training label"),
}


def _rank(metric: str) -> int:
    """The order in which metrics are shown: what to look at first comes first."""
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
            "layer": "layer whose skips are scaled",
            "columns": "c =",
            "value": name.replace("_", " "),
        },
        about=f"{about} after the skips of one layer were multiplied by c; 0 removes them.",
        unit=unit,
        better=better,
        section="blocks",
        note=f"with all its skips: {float(untouched.mean()):.4g}",
    )


def interval(values: Sequence[float] | Floats, confidence: float = 0.95) -> tuple[float, float]:
    """Student's interval of the mean of a few runs; NaN for fewer than two."""
    from scipy.stats import t

    found = np.asarray(values, dtype=np.float64)
    found = found[np.isfinite(found)]
    if len(found) < 2:
        return float("nan"), float("nan")
    half = t.ppf(0.5 + confidence / 2, len(found) - 1) * found.std(ddof=1) / len(found) ** 0.5
    return float(found.mean() - half), float(found.mean() + half)
