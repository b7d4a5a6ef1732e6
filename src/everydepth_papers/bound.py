"""The upper bound on gradient norms of Residual Relay, Theorem 1, and its ordering, Theorem 2.

The bound estimates the norm of a weight matrix from its standard deviation, as if its entries were
random and independent. It ignores the last norm, the gains of all norms, and that a norm divides
each token by that token's standard deviation, so ordinary networks exceed it, even random ones.
"repaired" restores the last norm and the tokens; even so it does not hold for every network, as the
counterexamples in docs/memorization.md show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from everydepth.ablations import Taps, tapped
from everydepth.ablations.result import Floats
from everydepth.ablations.study import by_layer
from everydepth.config import checked
from everydepth.errors import SettingError, UnsupportedModelError
from everydepth.stream import (
    Batch,
    ResidualStream,
    as_stream,
    evaluating,
    labeled_samples,
    no_labels,
    unwrapped,
)
from everydepth.stream.feed import Feed, Source
from everydepth.stream.maps import LinearMap, first_maps
from everydepth.stream.taps import hooked

Form = Literal["corrected", "as_printed", "repaired"]
FORMS: tuple[Form, ...] = ("corrected", "as_printed", "repaired")
TAPS = ("attention", "mlp")
"""What reads the stream at `x_l`, and at `x~_l`."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """The quantities the bound needs: standard deviations per layer, and sizes.

    If query, key and value are one matrix, `query` is the std of all of it. In a gated MLP, `first`
    is the std of the map applied first. gain: the largest entry of the last norm's weight; None if
    the readout has no norm.
    """

    query: tuple[float, ...]
    output: tuple[float, ...]
    first: tuple[float, ...]
    second: tuple[float, ...]
    head: float
    dim: int
    inner: int
    classes: int
    heads: int
    head_dim: int
    gain: float | None


@checked
def weight_widths(stream: ResidualStream, batch: Batch, heads: int | None = None) -> Widths:
    """Read the widths from the blocks. One batch shows which linear map each branch applies first.

    heads: the number of attention heads, if the model's config does not have it.
    """
    for number, block in enumerate(stream.blocks, start=1):
        kinds = [branch.kind for branch in block.branches]
        plain = all(b.post is None and b.skip is None for b in block.branches)
        if kinds != ["attention", "mlp"] or block.parallel or not plain:
            shape = "in parallel" if block.parallel else "one after the other"
            norm = "" if plain else ", with a norm or map in the skip path"
            raise UnsupportedModelError(
                "the bound is for pre-norm blocks of attention followed by MLP; block "
                f"{number} of {stream.name} has {', '.join(kinds) or 'no branches'} {shape}{norm}"
            )
    count = heads or stream.blocks[0].heads
    if count is None:
        raise SettingError(
            f"the number of attention heads in {stream.name} is unknown; pass heads="
        )
    first, gain = _first_maps(stream, batch)
    std = [[_std(m) for m in maps] for maps in first]
    pairs = [block.branches for block in stream.blocks]
    head = stream.linear_head("the bound")
    attended, inner = (LinearMap(branch.proj).sizes[1] for branch in pairs[0])
    return Widths(
        query=tuple(layer[0] for layer in std),
        output=tuple(_std(attention.proj) for attention, _ in pairs),
        first=tuple(layer[1] for layer in std),
        second=tuple(_std(mlp.proj) for _, mlp in pairs),
        head=_std(head),
        dim=head.in_features,
        inner=inner,
        classes=head.out_features,
        heads=count,
        head_dim=attended // count,
        gain=gain,
    )


@checked
def upper_bound(widths: Widths, taps: Taps, form: Form = "corrected") -> tuple[Floats, Floats]:
    """`log10` of the bound on each sample's gradient norm at `x_l` and `x~_l`: `(layer, sample)`.

    form: Eq. 17 of the paper assigns the attention's factor to `dy/dx~` and the MLP's to `dx~/dx`.
        By its own definitions it is the other way around; "as_printed" keeps it for comparison.
        At `x_l` the two agree. "repaired" is "corrected" with the smallest std of any token, times
        `max|gain| / std` of the input of the readout's norm.
    """
    if form not in FORMS:
        raise SettingError(f"form {form!r}; use one of {', '.join(FORMS)}")
    w, d = widths, float(widths.dim)
    length = taps.length.double().cpu().numpy()
    root = np.sqrt(length)
    spread = taps.least_std if form == "repaired" else taps.std
    sx = np.stack([s[0].double().cpu().numpy() for s in spread])
    sxt = np.stack([s[1].double().cpu().numpy() for s in spread])

    def column(values: Sequence[float]) -> Floats:
        return np.asarray(values, dtype=np.float64)[:, None]

    q = column(w.query)
    jacobian = w.heads * (
        (root + 2 + 1 / root) * q**3 * np.sqrt(d**3 * w.head_dim)
        + q * (np.sqrt(d) + np.sqrt(w.head_dim))
    )
    with np.errstate(divide="ignore"):
        attention = np.log10(1 + column(w.output) / sx * 2 * d * jacobian)
        ffn_size = (np.sqrt(d) + np.sqrt(w.inner)) ** 2
        ffn = np.log10(1 + column(w.first) * column(w.second) / sxt * ffn_size)
        error = np.log10(taps.error.double().cpu().numpy())
    top = error + np.log10(w.head * (np.sqrt(w.classes) + np.sqrt(d)))
    if form == "repaired" and w.gain is not None:
        top = top + np.log10(w.gain / taps.last_std.double().cpu().numpy())
    # Products over the layers from l to the last.
    both = np.cumsum((attention + ffn)[::-1], 0)[::-1]
    at_x = top + both
    own = attention if form == "as_printed" else ffn
    above = np.concatenate([both[1:], np.zeros_like(both[:1])])
    at_xt = top + above + own
    return at_x, at_xt


@dataclass(frozen=True, kw_only=True, eq=False)
class Bounded:
    """Every sample against the bound.

    norms: `log10` of the gradient norms by tap, `(layer, sample)`. bounds: likewise, by form.
    """

    widths: Widths
    norms: Mapping[str, Floats]
    bounds: Mapping[Form, Mapping[str, Floats]]

    def violations(self, form: Form = "corrected") -> dict[str, Floats]:
        """By tap and layer, the share of samples whose gradient norm exceeds the bound."""
        return {tap: (self.norms[tap] > bound).mean(1) for tap, bound in self.bounds[form].items()}

    @property
    def is_ordered(self) -> bool:
        """Theorem 2, at `x_l`, for every sample."""
        return is_ordered(self.bounds["corrected"]["attention"])


def bounded(
    model: nn.Module | ResidualStream,
    data: Source,
    *,
    only: Tensor | None = None,
    heads: int | None = None,
) -> Bounded:
    """Gradient norms and bounds of all labeled samples; an error if the model has no bound.

    only: the rows to use. heads: as in `weight_widths`.

    >>> from everydepth_papers.bound import bounded
    >>> found = bounded(model, test)
    >>> found.is_ordered, found.violations("repaired")["mlp"].shape  # one share per layer
    (True, (3,))
    """
    stream = as_stream(model)
    widths: Widths | None = None
    norms: dict[str, list[Floats]] = {tap: [] for tap in TAPS}
    bounds: dict[Form, dict[str, list[Floats]]] = {form: {t: [] for t in TAPS} for form in FORMS}
    with evaluating(stream):
        for batch in Feed(data, stream, only=only, again=True):
            widths = widths or weight_widths(stream, batch, heads)
            if labeled_samples(stream, batch) is None:
                continue
            taps = tapped(stream, batch)
            for tap in TAPS:
                norms[tap].append(by_layer(stream, taps.norms, tap))
            for form in FORMS:
                for tap, bound in zip(TAPS, upper_bound(widths, taps, form), strict=True):
                    bounds[form][tap].append(bound)
    if widths is None or not norms["attention"]:
        raise no_labels()
    with np.errstate(divide="ignore"):
        logs = {tap: np.log10(np.concatenate(found, 1)) for tap, found in norms.items()}
    whole: dict[Form, dict[str, Floats]] = {
        form: {tap: np.concatenate(v, 1) for tap, v in found.items()}
        for form, found in bounds.items()
    }
    return Bounded(widths=widths, norms=logs, bounds=whole)


@checked
def is_ordered(bound: Floats, tolerance: float = 1e-9) -> bool:
    """Theorem 2: whether the bound never rises from one layer to the next, for any sample."""
    # No difference: the bound is infinite if the entries of a token are all equal.
    values = np.atleast_1d(bound)
    return bool((values[1:] <= values[:-1] + tolerance).all())


def _std(module: nn.Module) -> float:
    return float(cast(Tensor, module.weight).detach().double().std(correction=0))


def _first_maps(stream: ResidualStream, batch: Batch) -> tuple[list[list[nn.Module]], float | None]:
    """The first linear map of each branch of each block, and the last norm's gain."""
    with first_maps(stream.blocks) as found, torch.no_grad():
        states = stream.observe(batch)
        gain = _gain(stream, states.feature(stream.depth))
    for number, maps in enumerate(found, start=1):
        if any(m is None for m in maps):
            raise UnsupportedModelError(
                f"a branch of block {number} of {stream.name} applies no linear map with a weight"
            )
    return cast(list[list[nn.Module]], found), gain


def _gain(stream: ResidualStream, feature: Tensor) -> float | None:
    """The largest weight of the readout's norm; None if it has no norm."""
    gains: list[float] = []

    def note(module: nn.Module, *_: Any) -> None:
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 1:
            gains.append(float(weight.detach().abs().max()))

    handles = [m.register_forward_pre_hook(note) for m in unwrapped(stream.model).modules()]
    with hooked(*handles):
        stream.normed(feature, stream.depth)
    return float(np.prod(gains)) if gains else None
