"""Choose which blocks to keep, without training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from everydepth.config import checked
from everydepth.errors import DepthError, SettingError
from everydepth.results import Fact, Results, curve, named, provenance
from everydepth.stream import (
    ResidualStream,
    States,
    Targets,
    as_stream,
    at_depth,
    evaluating,
    real_tokens,
)
from everydepth.stream.feed import Feed
from everydepth.stream.states import are_finite

By = Literal["influence", "span", "loss"]


class Choice(Results, kind="choice"):
    """The chosen blocks, and the measurement they were chosen by.

    >>> found = ed.choose_blocks(model, test, keep=2, by="loss", progress=False)
    >>> small = ed.at_depth(model, keep=found.keep)
    >>> small.config.num_hidden_layers
    2
    """

    keep = Fact[tuple[int, ...]](tuple)
    """The blocks to keep, from 1, for `at_depth(model, keep=...)`."""
    dropped = Fact[tuple[int, ...]](tuple)
    """The blocks to drop, the least important first."""


@checked
@torch.no_grad()
def choose_blocks(
    model: nn.Module | ResidualStream,
    data: Any,
    keep: int,
    *,
    by: By = "influence",
    batch_size: int | None = None,
    progress: bool = True,
    **options: Any,
) -> Choice:
    """Choose the `keep` most important blocks of a trained model.

    by: "influence" drops the blocks that change the direction of the state least,
        `1 - cos(h_{l-1}, h_l)`, in one pass over the data (ShortGPT). "span" drops the consecutive
        blocks that do so least together (Gromov et al.). "loss" drops one block after another, each
        time the one without which the loss is lowest; this takes a pass per remaining block.

    A baseline for models trained at every depth: without such training, the first k blocks are
    rarely the best k. A short `fit` of the remaining blocks recovers much of the loss.

    >>> found = ed.choose_blocks(model, test, keep=2, progress=False)
    >>> len(found.keep), len(found.dropped)
    (2, 1)
    """
    stream = as_stream(model, **options)
    if isinstance(keep, bool) or not 1 <= keep < stream.depth:
        raise DepthError(
            f"keep={keep!r}, but {stream.name} has {stream.depth} blocks; use 1 to "
            f"{stream.depth - 1}"
        )
    feed = Feed(data, stream, batch_size=batch_size)
    with evaluating(stream):
        judged = _by_loss if by == "loss" else _by_similarity
        dropped, result = judged(stream, feed.shown("blocks", progress), stream.depth - keep, by)
    kept = [block for block in range(1, stream.depth + 1) if block not in dropped]
    return Choice(
        results=named(result),
        about=provenance(
            model=stream.name, task=stream.task, depth=stream.depth, keep=kept, dropped=dropped
        ),
    )


def _by_similarity(
    stream: ResidualStream, batches: Iterator[Mapping[str, Any]], count: int, by: By
) -> tuple[list[int], Any]:
    length = count if by == "span" else 1
    starts = range(stream.depth - length + 1)
    sums, rows = torch.zeros(len(starts), dtype=torch.float64), 0
    for batch in batches:
        states = stream.observe(batch, logits=False)
        found = [_turned(states, start, start + length, by) for start in starts]
        if not all(bool(torch.isfinite(each).all()) for each in found):
            states.check_finite()
        sums += torch.stack([each.double().sum().cpu() for each in found])
        rows += len(found[0])
    means = sums / max(rows, 1)
    if by == "span":
        first = int(means.argmin())
        dropped = list(range(first + 1, first + length + 1))
    else:
        dropped = [int(i) + 1 for i in means.argsort(stable=True)[:count]]
    what = (
        "The mean angle between the states before and after the span, divided by pi."
        if by == "span"
        else "1 - cos of the states before and after a block, averaged over tokens."
    )
    result = curve(
        by,
        [start + 1 for start in starts],
        means.tolist(),
        axis="block",
        title="How much blocks change the direction of the state",
        about=what,
        section="structure",
        note=f"dropped: {', '.join(map(str, dropped))}",
    )
    return dropped, result


def _turned(states: States, before: int, after: int, by: By) -> Tensor:
    a, b = states[before], states[after]
    if a.shape != b.shape:
        raise SettingError(
            f"the state of {states.stream.name} changes its shape between depths {before} and "
            f"{after}, so there is no angle; use by='loss'"
        )
    shape = tuple(a.shape[:2])
    real = real_tokens(states.stream, states.batch, shape, a.device) if a.ndim == 3 else None
    if a.ndim != 3:
        a, b = a.flatten(1), b.flatten(1)
    elif real is not None:
        a, b = a[real], b[real]
    cosine = cosine_similarity(a.float(), b.float(), dim=-1).flatten()
    if by == "span":
        return cosine.clamp(-1, 1).acos() / torch.pi
    return 1 - cosine


def _by_loss(
    stream: ResidualStream, batches: Iterator[Mapping[str, Any]], count: int, by: By
) -> tuple[list[int], Any]:
    del by
    kept, dropped = list(range(1, stream.depth + 1)), list[int]()
    data = list(batches)
    curve_of = [_loss(stream, data, whole=True)]
    for _ in range(count):
        losses: dict[int, float] = {}
        for block in kept:
            rest = [other for other in kept if other != block]
            cut = as_stream(at_depth(stream, keep=rest, share=True), **stream.options)
            losses[block] = _loss(cut, data)
        best = min(losses, key=lambda block: losses[block])
        kept.remove(best)
        dropped.append(best)
        curve_of.append(losses[best])
    result = curve(
        "loss",
        range(count + 1),
        curve_of,
        axis="dropped",
        title="Loss by dropped blocks",
        about="The loss of the remaining blocks after each drop.",
        better="lower",
        section="prediction",
        note=f"dropped, in this order: {', '.join(map(str, dropped))}",
    )
    return dropped, result


def _loss(stream: ResidualStream, data: list[Mapping[str, Any]], *, whole: bool = False) -> float:
    """The mean loss of a model; infinity if a cut model overflows.

    whole: the uncut model, for which predictions that are not finite are an error.
    """
    total = amount = 0.0
    with evaluating(stream):
        for batch in data:
            states = stream.observe(batch)
            targets = Targets.of(stream, batch)
            z = targets.predicted(states, stream.depth)
            if whole and not bool(are_finite(z).all()):
                states.check_predictions(stream.depth)
            total += float((targets.losses(z) * targets.weights).sum())
            amount += float(targets.amount)
    return total / max(amount, 1e-12) if math.isfinite(total) else math.inf
