"""Gradients of learning compared with gradients of memorization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from everydepth.ablations.memorize import Flipped, flipped_rows
from everydepth.ablations.result import Floats
from everydepth.ablations.taps import tapped
from everydepth.config import checked
from everydepth.results import Result, Results, curve, named, provenance, scalars
from everydepth.results.result import numbers
from everydepth.stream import (
    ResidualStream,
    as_stream,
    evaluating,
    labeled_samples,
    no_labels,
)
from everydepth.stream.feed import Feed, Source
from everydepth.stream.maps import weight_spread


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """One set of samples: clean test samples ("learning") or flipped training samples.

    norms, std: by tap, `(layer, sample)`. A tap is named after the branch that reads it: in a
        transformer, `attention` is `x_l` and `mlp` is `x~_l`. NaN if a layer has no such tap.
    error: `||softmax(z) - onehot(y)||` per sample. margin, loss: per sample.
    """

    norms: Mapping[str, Floats]
    std: Mapping[str, Floats]
    error: Floats
    loss: Floats
    margin: Floats

    def arrays(self, name: str) -> dict[str, Floats]:
        """Everything as named arrays, the inverse of `read`."""
        nested: dict[str, Mapping[str, Floats]] = {"norms": self.norms, "std": self.std}
        found = {f"{name}.{part}": getattr(self, part) for part in ("error", "loss", "margin")}
        for part, taps in nested.items():
            found |= {f"{name}.{part}.{tap}": values for tap, values in taps.items()}
        return found

    @classmethod
    def read(cls, name: str, arrays: Mapping[str, Any]) -> Side:
        """The side called `name`, from what `arrays` returned."""

        def taps(part: str) -> dict[str, Floats]:
            start = f"{name}.{part}."
            return {k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)}

        return cls(
            norms=taps("norms"),
            std=taps("std"),
            error=arrays[f"{name}.error"],
            loss=arrays[f"{name}.loss"],
            margin=arrays[f"{name}.margin"],
        )

    @property
    def norm(self) -> Floats:
        """Per layer, the mean over samples and then over taps."""
        return np.nanmean(np.stack([v.mean(1) for v in self.norms.values()]), 0)


class GradientStudy(Results, kind="gradient_study"):
    """Gradient norms of clean test samples and of flipped training samples, per layer.

    `study["gradient_ratio"]` is the ratio of memorization to learning, one number per layer;
    `study["weight_std"]` and the other measurements correspond to the paper's figures.

    >>> study = ed.gradient_study(model, valid, noisy, flipped=noise, progress=False)
    >>> study.smaller.shape  # per layer: memorization norm over learning norm
    (3,)
    """

    @classmethod
    def of(
        cls,
        learning: Side,
        memorization: Side,
        weights: Mapping[str, Floats],
        **facts: Any,
    ) -> GradientStudy:
        """weights: by name inside a block, the standard deviation of the matrix in each layer (NaN
        if a layer has none)."""
        found = _measurements(learning, memorization, weights)
        return cls(results=named(*found), about=provenance(**facts))

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, from 1."""
        return tuple(range(1, self.depth + 1))

    @property
    def learning(self) -> Side:
        """Clean test samples."""
        return Side.read("learning", self.result("samples").arrays)

    @property
    def memorization(self) -> Side:
        """Training samples whose label was flipped."""
        return Side.read("memorization", self.result("samples").arrays)

    @property
    def weights(self) -> Mapping[str, Floats]:
        """By name of a matrix, its standard deviation in every layer; NaN if it has none."""
        found = self.result("weight_std")
        return {name: numbers(found.arrays[name]) for name in found.series}

    @property
    def smaller(self) -> Floats:
        """Per layer, memorization norm over learning norm; below 1 according to the paper."""
        return self["gradient_ratio"]


def _measurements(
    learning: Side, memorization: Side, weights: Mapping[str, Floats]
) -> tuple[Result, ...]:
    sides = {"learning": learning, "memorization": memorization}
    layer = np.arange(1, len(learning.norm) + 1)

    def layered(name: str, series: Mapping[str, Floats], **words: Any) -> Result:
        return curve(name, layer, series, axis="layer", section="gradients", **words)

    found = [
        layered(
            "gradient_norm",
            {name: side.norm for name, side in sides.items()},
            title="Gradients of learning and memorization",
            about="Gradient norm at each layer's input, for clean test samples and for training "
            "samples with a wrong label.",
        ),
        layered(
            "gradient_ratio",
            {"ratio": memorization.norm / learning.norm},
            title="Ratio of memorization to learning",
            about="Below 1, wrong labels have smaller gradients.",
        ),
        layered(
            "stream_std",
            {
                f"{name}_{tap}": values.mean(1)
                for name, side in sides.items()
                for tap, values in side.std.items()
            },
            title="Spread of the stream",
            about="Standard deviation of each branch's input.",
        ),
        layered(
            "weight_std",
            weights,
            title="Spread of the weights",
            about="Standard deviation of each weight matrix.",
        ),
        scalars(
            "prediction_error",
            {name: float(side.error.mean()) for name, side in sides.items()},
            title="Distance to the label",
            about="Mean norm of the difference between probabilities and label.",
            section="gradients",
        ),
    ]
    samples = {
        key: value for name, side in sides.items() for key, value in side.arrays(name).items()
    }
    found.append(
        Result(
            name="samples",
            kind="rows",
            series=(),
            arrays=samples,
            about="Every sample on its own; the other measurements are means of these.",
        )
    )
    return tuple(found)


@checked
def gradient_study(
    model: nn.Module | ResidualStream,
    clean: Source,
    noisy: Source,
    *,
    flipped: Flipped | None = None,
    batch_size: int | None = None,
    max_samples: int | None = None,
    progress: bool = True,
    **options: Any,
) -> GradientStudy:
    """Gradient norms of learning and of memorization at every residual connection.

    clean: test data. noisy, flipped: as in `memorization`; only the flipped rows are used.

    >>> study = ed.gradient_study(model, valid, noisy, flipped=noise, progress=False)
    >>> study.learning.norm.shape, study.memorization.norm.shape  # one number per layer
    ((3,), (3,))
    """
    stream = as_stream(model, **options)
    how: dict[str, Any] = {"batch_size": batch_size, "max_samples": max_samples, "again": True}
    clean_rows = Feed(clean, stream, **how)
    flipped_only = Feed(noisy, stream, only=flipped_rows(flipped), **how)
    with evaluating(stream):
        learning = _side(stream, clean_rows, "learning", progress)
        memorization = _side(stream, flipped_only, "memorization", progress)
    return GradientStudy.of(
        learning,
        memorization,
        weight_spread(stream.blocks),
        model=stream.name,
        task=stream.task,
        depth=stream.depth,
        samples=len(learning.error),
    )


def _side(stream: ResidualStream, feed: Feed, what: str, progress: bool) -> Side:
    names = tap_names(stream)
    norms: dict[str, list[Floats]] = {name: [] for name in names}
    std: dict[str, list[Floats]] = {name: [] for name in names}
    parts: dict[str, list[Floats]] = {"error": [], "loss": [], "margin": []}
    for batch in feed.shown(what, progress):
        if labeled_samples(stream, batch) is None:
            continue
        taps = tapped(stream, batch)
        for name in names:
            norms[name].append(by_layer(stream, taps.norms, name))
            std[name].append(by_layer(stream, taps.std, name))
        for name, values in (("error", taps.error), ("loss", taps.losses), ("margin", taps.margin)):
            parts[name].append(values.double().cpu().numpy())
    if not parts["error"]:
        raise no_labels()
    return Side(
        norms={name: np.concatenate(v, 1) for name, v in norms.items()},
        std={name: np.concatenate(v, 1) for name, v in std.items()},
        **{name: np.concatenate(values) for name, values in parts.items()},
    )


def tap_names(stream: ResidualStream) -> list[str]:
    """The names of branches, in order of their first appearance."""
    return list(dict.fromkeys(name for block in stream.blocks for name in block.names))


def by_layer(stream: ResidualStream, values: Sequence[Tensor], name: str) -> Floats:
    """`(layer, sample)` of one tap."""
    samples = values[0].shape[-1]
    found = np.full((stream.depth, samples), np.nan)
    for layer, (block, at) in enumerate(zip(stream.blocks, values, strict=True)):
        if name in block.names:
            found[layer] = at[block.names.index(name)].double().cpu().numpy()
    return found
