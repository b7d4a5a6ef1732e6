"""Learning against memorization, seen by gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from everydepth.ablations.bound import FORMS, Form, is_ordered, upper_bound, weight_widths
from everydepth.ablations.memorize import Flipped, flipped_rows
from everydepth.ablations.result import Ablation, Floats
from everydepth.ablations.taps import tapped
from everydepth.config import checked
from everydepth.errors import SettingError, UnsupportedModelError
from everydepth.results import Result, Results, curve, defined, named, provenance, scalars
from everydepth.results.result import numbers
from everydepth.stream import (
    ResidualStream,
    as_stream,
    evaluating,
    labelled_samples,
    nothing_asked,
    unwrapped,
)
from everydepth.stream.feed import Feed, Source


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """One set of samples: clean test samples ("learning") or flipped training samples.

    norms, std: by tap `(layer, sample)`; taps are named by what reads them: `attention` is `x_l`
        and `mlp` is `x~_l` of a transformer. NaN where a layer has no such tap.
    error: `||softmax(z) - onehot(y)||` per sample. margin, loss: per sample.
    bounds: by form (see `upper_bound`) and tap, `log10` of the upper bound; None where it is not
        defined.
    """

    norms: Mapping[str, Floats]
    std: Mapping[str, Floats]
    error: Floats
    loss: Floats
    margin: Floats
    bounds: Mapping[Form, Mapping[str, Floats]] | None

    def arrays(self, name: str) -> dict[str, Floats]:
        """As named arrays, which `read` takes apart again."""
        nested: dict[str, Mapping[str, Floats]] = {"norms": self.norms, "std": self.std}
        nested |= {f"bounds-{form}": taps for form, taps in (self.bounds or {}).items()}
        found = {f"{name}.{part}": getattr(self, part) for part in ("error", "loss", "margin")}
        for part, taps in nested.items():
            found |= {f"{name}.{part}.{tap}": values for tap, values in taps.items()}
        return found

    @classmethod
    def read(cls, name: str, arrays: Mapping[str, Any]) -> Side:
        """From what `arrays` gave."""

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
        """Per layer: the mean over samples, then over the taps of the layer."""
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

    `study["gradient_ratio"]` is memorization over learning, one number per layer;
    `study["weight_std"]` and the other measurements are what the paper's figures show.

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
        """weights: standard deviation of every weight matrix, by its name inside a block; NaN where
        a layer has none of that name. note: why there is no bound, where there is none."""
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
        """By name of the matrix, its standard deviation at every layer; NaN where it has none."""
        found = self.result("weight_std")
        return {name: numbers(found.arrays[name]) for name in found.series}

    @property
    def note(self) -> str | None:
        """Why there is no bound, where there is none."""
        return self.result("samples").note

    @property
    def smaller(self) -> Floats:
        """Per layer: memorization norm over learning norm; below 1 as the paper says."""
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
            title="Gradients of learning and of memorizing",
            about="Length of the gradient at each layer's input, for clean test samples and for "
            "training samples with a wrong label.",
        ),
        by_layer(
            "gradient_ratio",
            {"ratio": memorization.norm / learning.norm},
            title="Memorizing over learning",
            about="Below 1 the gradients of wrong labels are the smaller ones.",
        ),
        by_layer(
            "stream_std",
            {
                f"{name}_{tap}": values.mean(1)
                for name, side in sides.items()
                for tap, values in side.std.items()
            },
            title="Spread of the stream",
            about="Standard deviation of what each branch reads.",
        ),
        by_layer(
            "weight_std",
            weights,
            title="Spread of the weights",
            about="Standard deviation of each matrix.",
        ),
        scalars(
            "prediction_error",
            {name: float(side.error.mean()) for name, side in sides.items()},
            title="Distance to the label",
            about="Mean length of the difference between probabilities and label.",
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
                about="What was measured, beside the forms of Theorem 1's upper bound.",
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
            about="Every sample by itself; what the other measurements are means of.",
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
    """Gradient norms at every residual connection, of learning and of memorization.

    clean: test data. noisy, flipped: as in `memorization`; only the flipped rows are looked at.
    heads: attention heads, for the bound, where the model's config does not say.

    >>> study = ed.gradient_study(model, valid, noisy, flipped=noise, progress=False)
    >>> study.learning.norm.shape, study.memorization.norm.shape  # one number per layer
    ((3,), (3,))
    """
    stream = as_stream(model, **options)
    rows = flipped_rows(flipped)
    feeds = {
        "learning": Feed(clean, stream, batch_size=batch_size, max_samples=max_samples, again=True),
        "memorization": Feed(
            noisy,
            stream,
            batch_size=batch_size,
            max_samples=max_samples,
            only=rows,
            again=True,
        ),
    }
    sides: dict[str, Side] = {}
    note: str | None = None
    with evaluating(unwrapped(stream.model)):
        for name, feed in feeds.items():
            sides[name], note = _side(stream, feed, name, heads, progress)
    return GradientStudy.of(
        sides["learning"],
        sides["memorization"],
        _weights(stream),
        note,
        model=stream.name,
        task=stream.task,
        depth=stream.depth,
        samples=len(sides["learning"].error),
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
        if labelled_samples(stream, batch) is None:
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
        raise nothing_asked()

    def joined(found: list[tuple[Floats, Floats]]) -> dict[str, Floats]:
        pairs = zip(*found, strict=True)
        return {
            name: np.concatenate(both, 1)
            for name, both in zip(("attention", "mlp"), pairs, strict=True)
        }

    side = Side(
        norms={name: np.concatenate(v, 1) for name, v in norms.items()},
        std={name: np.concatenate(v, 1) for name, v in std.items()},
        error=np.concatenate(parts["error"]),
        loss=np.concatenate(parts["loss"]),
        margin=np.concatenate(parts["margin"]),
        bounds=None if widths is None else {form: joined(found) for form, found in bounds.items()},
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


def _weights(stream: ResidualStream) -> dict[str, Floats]:
    found: dict[str, Floats] = {}
    for layer, block in enumerate(stream.blocks):
        for name, parameter in block.module.named_parameters():
            if parameter.ndim >= 2:
                key = name.removesuffix(".weight")
                column = found.setdefault(key, np.full(stream.depth, np.nan))
                column[layer] = float(parameter.detach().double().std(correction=0))
    return found


class UnifiedView(Results, kind="unified_view"):
    """Per layer: gradient norm of learning, margin and accuracy after its skips were removed."""

    @property
    def spearman(self) -> dict[str, float]:
        """By pair of these three, the rank correlation over layers; NaN where one is constant."""
        arrays = self.result("spearman").arrays
        return {name: float(arrays[name]) for name in self.result("spearman").series}


def unified_view(study: GradientStudy, ablation: Ablation) -> UnifiedView:
    """Gradients, margins and accuracy of every layer side by side. The ablation must hold c = 0.

    >>> study = ed.gradient_study(model, valid, noisy, flipped=noise, progress=False)
    >>> ablation = ed.ablate(model, valid, c=(0.0, 1.0), progress=False)
    >>> from everydepth.ablations import unified_view
    >>> sorted(unified_view(study, ablation).spearman)
    ['gradient_norm/accuracy', 'gradient_norm/margin', 'margin/accuracy']
    """
    if ablation.layers != study.layers:
        raise SettingError(
            f"the ablation has layers {ablation.layers} and the study {study.layers}; "
            "ablate all layers of the same model"
        )
    values = {
        "gradient_norm": study.learning.norm,
        "margin": ablation.at("margin", 0.0),
        "accuracy": ablation.at("accuracy", 0.0),
    }
    pairs = (
        ("gradient_norm", "margin"),
        ("gradient_norm", "accuracy"),
        ("margin", "accuracy"),
    )
    curves = [
        curve(name, study.layers, value, axis="layer", section="gradients", about=about)
        for (name, value), about in zip(values.items(), _VIEWED, strict=True)
    ]
    ranks = scalars(
        "spearman",
        {f"{a}/{b}": spearman(values[a], values[b]) for a, b in pairs},
        title="Do the three rank the layers alike?",
        about="Rank correlations over layers.",
        section="gradients",
    )
    about = provenance(model=study.model, depth=study.depth, samples=study.samples)
    against = [_against(what, values, study.layers) for what in ("margin", "accuracy")]
    return UnifiedView(results=named(*against, *curves, ranks), about=about)


def _against(what: str, values: Mapping[str, Floats], layers: Sequence[int]) -> Result:
    return Result(
        name=f"{what}_against_gradient",
        kind="scatter",
        axis="gradient_norm",
        series=(what,),
        arrays={
            "gradient_norm": values["gradient_norm"],
            what: defined(values[what]),
            "text": np.array([f"layer {n}" for n in layers]),
        },
        labels={"gradient_norm": "gradient norm of learning", what: f"{what} without the skips"},
        title=f"Gradient and {what} of each layer",
        about="Layers with large gradients should be missed most.",
        section="blocks",
    )


_VIEWED = (
    "Length of the gradient of clean test samples.",
    "Top-1 minus top-2 logit after the skips of this layer were removed.",
    "Accuracy after the skips of this layer were removed.",
)


def spearman(a: Floats, b: Floats) -> float:
    """The rank correlation; NaN where one of the two is constant."""
    from scipy.stats import rankdata

    ranks = [rankdata(x) - (len(x) + 1) / 2 for x in (a, b)]
    scale = float(np.linalg.norm(ranks[0]) * np.linalg.norm(ranks[1]))
    return float(ranks[0] @ ranks[1]) / scale if scale > 0 else float("nan")
