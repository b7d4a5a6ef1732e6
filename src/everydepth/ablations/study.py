"""Gradients of learning compared with gradients of memorization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from everydepth.ablations.bound import FORMS, Form, is_ordered, upper_bound, weight_widths
from everydepth.ablations.memorize import Flipped, flipped_rows
from everydepth.ablations.result import Floats
from everydepth.ablations.taps import tapped
from everydepth.config import checked
from everydepth.errors import SettingError, UnsupportedModelError
from everydepth.results import Result, Results, curve, named, provenance, scalars
from everydepth.results.result import numbers
from everydepth.stream import (
    ResidualStream,
    as_stream,
    evaluating,
    labeled_samples,
    no_labels,
    unwrapped,
)
from everydepth.stream.feed import Feed, Source
from everydepth.stream.maps import weight_spread


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """One set of samples: clean test samples ("learning") or flipped training samples.

    norms, std: by tap, `(layer, sample)`. A tap is named after the branch that reads it: in a
        transformer, `attention` is `x_l` and `mlp` is `x~_l`. NaN if a layer has no such tap.
    error: `||softmax(z) - onehot(y)||` per sample. margin, loss: per sample.
    bounds: by form (see `upper_bound`) and tap, `log10` of the upper bound; None if undefined.
    """

    norms: Mapping[str, Floats]
    std: Mapping[str, Floats]
    error: Floats
    loss: Floats
    margin: Floats
    bounds: Mapping[Form, Mapping[str, Floats]] | None

    def arrays(self, name: str) -> dict[str, Floats]:
        """Everything as named arrays, the inverse of `read`."""
        nested: dict[str, Mapping[str, Floats]] = {"norms": self.norms, "std": self.std}
        nested |= {f"bounds-{form}": taps for form, taps in (self.bounds or {}).items()}
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

        bounds: dict[Form, dict[str, Floats]] = {form: taps(f"bounds-{form}") for form in FORMS}
        return cls(
            norms=taps("norms"),
            std=taps("std"),
            error=arrays[f"{name}.error"],
            loss=arrays[f"{name}.loss"],
            margin=arrays[f"{name}.margin"],
            bounds=bounds if all(bounds.values()) else None,
        )

    @property
    def norm(self) -> Floats:
        """Per layer, the mean over samples and then over taps."""
        return np.nanmean(np.stack([v.mean(1) for v in self.norms.values()]), 0)

    def violations(self, form: Form = "corrected") -> dict[str, Floats] | None:
        """By tap and layer, the share of samples whose gradient norm exceeds the bound."""
        if self.bounds is None:
            return None
        with np.errstate(divide="ignore"):
            return {
                tap: (np.log10(self.norms[tap]) > bound).mean(1)
                for tap, bound in self.bounds[form].items()
            }


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
        note: str | None,
        **facts: Any,
    ) -> GradientStudy:
        """weights: by name inside a block, the standard deviation of the matrix in each layer (NaN
        if a layer has none). note: why there is no bound, if there is none."""
        found = _measurements(learning, memorization, weights, note)
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
    def note(self) -> str | None:
        """Why there is no bound, if there is none."""
        return self.result("samples").note

    @property
    def smaller(self) -> Floats:
        """Per layer, memorization norm over learning norm; below 1 according to the paper."""
        return self["gradient_ratio"]

    @property
    def bound_is_ordered(self) -> bool | None:
        """Theorem 2, at `x_l`, for every sample."""
        found = [side.bounds for side in (self.learning, self.memorization) if side.bounds]
        return all(is_ordered(b["corrected"]["attention"]) for b in found) if found else None


def _measurements(
    learning: Side, memorization: Side, weights: Mapping[str, Floats], note: str | None
) -> tuple[Result, ...]:
    sides = {"learning": learning, "memorization": memorization}
    layer = np.arange(1, len(learning.norm) + 1)

    def by_layer(name: str, series: Mapping[str, Floats], **words: Any) -> Result:
        return curve(name, layer, series, axis="layer", section="gradients", **words)

    found = [
        by_layer(
            "gradient_norm",
            {name: side.norm for name, side in sides.items()},
            title="Gradients of learning and memorization",
            about="Gradient norm at each layer's input, for clean test samples and for training "
            "samples with a wrong label.",
        ),
        by_layer(
            "gradient_ratio",
            {"ratio": memorization.norm / learning.norm},
            title="Ratio of memorization to learning",
            about="Below 1, wrong labels have smaller gradients.",
        ),
        by_layer(
            "stream_std",
            {
                f"{name}_{tap}": values.mean(1)
                for name, side in sides.items()
                for tap, values in side.std.items()
            },
            title="Spread of the stream",
            about="Standard deviation of each branch's input.",
        ),
        by_layer(
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
    for tap, norms in learning.norms.items() if learning.bounds else ():
        lines = {"measured": norms.mean(1)}
        lines |= {form: 10 ** taps[tap].mean(1) for form, taps in (learning.bounds or {}).items()}
        found.append(
            by_layer(
                f"bound_{tap}",
                lines,
                labels={key: f"{key.replace('_', ' ')}: ‖gradient‖ at {tap}" for key in lines},
                title=f"Gradient at {tap} and its bound",
                about="Measured norm, and the forms of Theorem 1's upper bound.",
            )
        )
    samples = {
        key: value for name, side in sides.items() for key, value in side.arrays(name).items()
    }
    found.append(
        Result(
            name="samples",
            kind="rows",
            series=(),
            arrays=samples,
            note=note,
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
    heads: int | None = None,
    progress: bool = True,
    **options: Any,
) -> GradientStudy:
    """Gradient norms of learning and of memorization at every residual connection.

    clean: test data. noisy, flipped: as in `memorization`; only the flipped rows are used.
    heads: the number of attention heads for the bound, if the model's config does not have it.

    >>> study = ed.gradient_study(model, valid, noisy, flipped=noise, progress=False)
    >>> study.learning.norm.shape, study.memorization.norm.shape  # one number per layer
    ((3,), (3,))
    """
    stream = as_stream(model, **options)
    how: dict[str, Any] = {"batch_size": batch_size, "max_samples": max_samples, "again": True}
    clean_rows = Feed(clean, stream, **how)
    flipped_only = Feed(noisy, stream, only=flipped_rows(flipped), **how)
    with evaluating(unwrapped(stream.model)):
        learning, _ = _side(stream, clean_rows, "learning", heads, progress)
        memorization, note = _side(stream, flipped_only, "memorization", heads, progress)
    return GradientStudy.of(
        learning,
        memorization,
        weight_spread(stream.blocks),
        note,
        model=stream.name,
        task=stream.task,
        depth=stream.depth,
        samples=len(learning.error),
    )


def _side(
    stream: ResidualStream, feed: Feed, what: str, heads: int | None, progress: bool
) -> tuple[Side, str | None]:
    names = tap_names(stream)
    norms: dict[str, list[Floats]] = {name: [] for name in names}
    std: dict[str, list[Floats]] = {name: [] for name in names}
    parts: dict[str, list[Floats]] = {"error": [], "loss": [], "margin": []}
    bounds: dict[Form, list[tuple[Floats, Floats]]] = {form: [] for form in FORMS}
    widths, note = None, None
    for batch in feed.shown(what, progress):
        if widths is None and note is None:
            try:
                widths = weight_widths(stream, batch, heads)
            except (UnsupportedModelError, SettingError) as reason:
                note = f"no bound: {reason}"
        if labeled_samples(stream, batch) is None:
            continue
        taps = tapped(stream, batch)
        for name in names:
            norms[name].append(_by_layer(stream, taps.norms, name))
            std[name].append(_by_layer(stream, taps.std, name))
        for name, values in (("error", taps.error), ("loss", taps.losses), ("margin", taps.margin)):
            parts[name].append(values.double().cpu().numpy())
        if widths is not None:
            for form, found in bounds.items():
                found.append(upper_bound(widths, taps, form))
    if not parts["error"]:
        raise no_labels()

    def joined(found: list[tuple[Floats, Floats]]) -> dict[str, Floats]:
        attention, mlp = zip(*found, strict=True)
        return {"attention": np.concatenate(attention, 1), "mlp": np.concatenate(mlp, 1)}

    side = Side(
        norms={name: np.concatenate(v, 1) for name, v in norms.items()},
        std={name: np.concatenate(v, 1) for name, v in std.items()},
        bounds=None if widths is None else {form: joined(found) for form, found in bounds.items()},
        **{name: np.concatenate(values) for name, values in parts.items()},
    )
    return side, note


def tap_names(stream: ResidualStream) -> list[str]:
    """The kinds of branches, in order of their first appearance."""
    return list(dict.fromkeys(b.kind for block in stream.blocks for b in block.branches))


def _by_layer(stream: ResidualStream, values: Sequence[Tensor], name: str) -> Floats:
    """`(layer, sample)` of one tap."""
    samples = values[0].shape[-1]
    found = np.full((stream.depth, samples), np.nan)
    for layer, (block, at) in enumerate(zip(stream.blocks, values, strict=True)):
        for branch, value in zip(block.branches, at, strict=True):
            if branch.kind == name:
                found[layer] = value.double().cpu().numpy()
    return found
