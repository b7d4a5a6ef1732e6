"""Learning and memorization during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from everydepth.ablations.memorize import Flipped, flipped_rows, memorization
from everydepth.ablations.skips import checked_layers
from everydepth.ablations.study import gradient_study
from everydepth.config import Count, checked
from everydepth.runs.callback import Callback
from everydepth.stream.feed import Source


@checked
class GradientWatch(Callback):
    """A callback for `ed.fit` that measures gradient norms, margins and memorization.

    layers: by default the first, a middle and the last one. every: measure after this many epochs.
    Measurements end up in `result.callbacks["GradientWatch"]["epochs"]`.

    >>> from everydepth.ablations import GradientWatch
    >>> watch = GradientWatch(valid, noisy, flipped=noise, max_samples=64)
    >>> net = ed.EveryDepth(model, ed.end_to_end())
    >>> done = ed.fit(net, noisy, epochs=1, callbacks=[watch], progress=False)
    >>> len(done.callbacks["GradientWatch"]["epochs"])
    1
    """

    kept = ("epochs",)

    def __init__(
        self,
        clean: Source,
        noisy: Source,
        *,
        flipped: Flipped,
        layers: Sequence[int] | None = None,
        every: Count = 1,
        max_samples: int | None = 256,
    ) -> None:
        flipped_rows(flipped)
        self.clean, self.noisy, self.flipped = clean, noisy, flipped
        self.layers, self.every, self.max_samples = layers, every, max_samples
        self.epochs: list[dict[str, Any]] = []

    def on_epoch(self, training: Any) -> None:
        if (training.epoch + 1) % self.every:
            return
        stream = training.net.stream
        last = stream.depth
        layers = checked_layers(stream, self.layers or sorted({1, (last + 1) // 2, last}))
        # Training must draw the same random numbers as without this callback.
        with torch.random.fork_rng():
            study = gradient_study(
                stream,
                self.clean,
                self.noisy,
                flipped=self.flipped,
                max_samples=self.max_samples,
                progress=False,
            )
            memorized = memorization(stream, self.noisy, flipped=self.flipped, progress=False)
        sides = {"learning": study.learning, "memorization": study.memorization}
        entry: dict[str, Any] = {
            "epoch": training.epoch + 1,
            "memorization": memorized.memorization,
            "train_accuracy": memorized.train_accuracy,
        }
        for name, side in sides.items():
            entry[f"{name}_norm"] = {str(n): float(side.norm[n - 1]) for n in layers}
            entry[f"{name}_margin"] = float(side.margin.mean())
            entry[f"{name}_error"] = float(side.error.mean())
        self.epochs.append(entry)
        training.log({"watch": entry})

    def results(self) -> Mapping[str, Any]:
        return self.state_dict()
