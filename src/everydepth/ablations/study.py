"""Learning against memorization, seen by gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from everydepth.ablations.bound import FORMS, Form, is_ordered, upper_bound, weight_widths
from everydepth.ablations.memorize import flipped_rows
from everydepth.ablations.result import Ablation, Floats, as_lists
from everydepth.ablations.taps import tapped
from everydepth.data import NoisyLabels
from everydepth.data.feeding import Feed, Source
from everydepth.errors import SettingError, UnsupportedModelError
from everydepth.stream import (
    ResidualStream,
    as_stream,
    evaluating,
    labelled_samples,
    nothing_asked,
    unwrapped,
)


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


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientStudy:
    """Gradient norms of clean test samples and of flipped training samples, per layer.

    weights: standard deviation of every weight matrix, by its name inside a block; NaN where a
        layer has none of that name.
    note: why there is no bound, where there is none.

    >>> study = ed.gradient_study(model, valid, noisy, flipped=noise, progress=False)
    >>> study.smaller.shape  # per layer: memorisation norm over learning norm
    (3,)
    """

    model: str
    layers: tuple[int, ...]
    learning: Side
    memorization: Side
    weights: Mapping[str, Floats]
    note: str | None

    @property
    def smaller(self) -> Floats:
        """Per layer: memorisation norm over learning norm; below 1 as the paper says."""
        return self.memorization.norm / self.learning.norm

    @property
    def bound_is_ordered(self) -> bool | None:
        """Theorem 2, at `x_l`, for every sample."""
        found = [side.bounds for side in (self.learning, self.memorization) if side.bounds]
        return all(is_ordered(b["corrected"]["attention"]) for b in found) if found else None

    def table(self) -> str:
        lines = [f"{'layer':<7}{'learning':>12}{'memorization':>14}{'ratio':>8}"]
        both = zip(
            self.layers, self.learning.norm, self.memorization.norm, self.smaller, strict=True
        )
        lines += [f"{n:<7}{a:>12.4g}{b:>14.4g}{r:>8.3f}" for n, a, b, r in both]
        lines.append(
            f"prediction error: learning {self.learning.error.mean():.4g}, "
            f"memorization {self.memorization.error.mean():.4g}"
        )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Means over samples, as JSON."""
        sides = {"learning": self.learning, "memorization": self.memorization}
        return {
            "model": self.model,
            "layers": list(self.layers),
            "note": self.note,
            "weights": {name: as_lists(v) for name, v in self.weights.items()},
            "bound_is_ordered": self.bound_is_ordered,
            **{name: _side_json(side) for name, side in sides.items()},
        }


def _side_json(side: Side) -> dict[str, Any]:
    def means(values: Mapping[str, Floats] | None) -> Any:
        return None if values is None else {k: as_lists(v.mean(1)) for k, v in values.items()}

    return {
        "samples": len(side.error),
        "norm": as_lists(side.norm),
        "norms": means(side.norms),
        "std": means(side.std),
        "error": float(side.error.mean()),
        "loss": float(side.loss.mean()),
        "margin": as_lists(float(side.margin.mean())),
        "log10_bound": {form: means(bound) for form, bound in (side.bounds or {}).items()},
        "violations": {
            form: {tap: as_lists(v) for tap, v in (side.violations(form) or {}).items()}
            for form in side.bounds or {}
        },
    }


def gradient_study(
    model: nn.Module | ResidualStream,
    clean: Source,
    noisy: Source,
    *,
    flipped: NoisyLabels | Tensor | Sequence[int] | None = None,
    batch_size: int | None = None,
    max_samples: int | None = None,
    heads: int | None = None,
    progress: bool = True,
    **options: Any,
) -> GradientStudy:
    """Gradient norms at every residual connection, of learning and of memorisation.

    clean: test data. noisy, flipped: as in `memorization`; only the flipped rows are looked at.
    heads: attention heads, for the bound, where the model's config does not say.

    >>> study = ed.gradient_study(model, valid, noisy, flipped=noise, progress=False)
    >>> study.learning.norm.shape, study.memorization.norm.shape  # one number a layer
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
    return GradientStudy(
        model=stream.name,
        layers=tuple(range(1, stream.depth + 1)),
        learning=sides["learning"],
        memorization=sides["memorization"],
        weights=_weights(stream),
        note=note,
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


@dataclass(frozen=True, kw_only=True, eq=False)
class UnifiedView:
    """Per layer: gradient norm of learning, margin and accuracy after its skips were removed.

    spearman: by pair of these three, the rank correlation over layers; NaN where one is constant.
    """

    layers: tuple[int, ...]
    gradient_norm: Floats
    margin: Floats
    accuracy: Floats
    spearman: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "layers": list(self.layers),
            "gradient_norm": as_lists(self.gradient_norm),
            "margin": as_lists(self.margin),
            "accuracy": as_lists(self.accuracy),
            "spearman": {pair: as_lists(value) for pair, value in self.spearman.items()},
        }


def unified_view(study: GradientStudy, ablation: Ablation) -> UnifiedView:
    """Gradients, margins and accuracy of every layer side by side. The ablation must hold c = 0.

    >>> study = ed.gradient_study(model, valid, noisy, flipped=noise, progress=False)
    >>> ablation = ed.ablate(model, valid, c=(0.0, 1.0), progress=False)
    >>> sorted(ed.unified_view(study, ablation).spearman)
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
    return UnifiedView(
        layers=study.layers,
        spearman={f"{a}/{b}": spearman(values[a], values[b]) for a, b in pairs},
        **values,
    )


def spearman(a: Floats, b: Floats) -> float:
    """The rank correlation; NaN where one of the two is constant."""
    from scipy.stats import rankdata

    ranks = [rankdata(x) - (len(x) + 1) / 2 for x in (a, b)]
    scale = float(np.linalg.norm(ranks[0]) * np.linalg.norm(ranks[1]))
    return float(ranks[0] @ ranks[1]) / scale if scale > 0 else float("nan")
