"""Would a block help here? The first-order signal of every site, from one pass over the data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from everydepth.config import Seed, Setting, checked
from everydepth.errors import BatchError, SettingError, UnsupportedModelError
from everydepth.growth.candidates import Candidate, Direction, candidate, pairs, product, settle
from everydepth.growth.losses import beside, check_finite, mean_of, row_losses
from everydepth.growth.sites import (
    DEEPEN,
    NO,
    UNSURE,
    Alignment,
    Covariance,
    Score,
    SiteScore,
)
from everydepth.growth.statistics import GROUPS, GroupSums, adjusted_p, evidence
from everydepth.stream import (
    Criterion,
    ResidualStream,
    as_stream,
    differentiating,
    evaluating,
    insert,
    sites,
    unwrapped,
)
from everydepth.stream.feed import Feed
from everydepth.stream.gradients import disagreement_bound, spectrum, summed_over_positions
from everydepth.stream.insert import template
from everydepth.stream.maps import LinearMap
from everydepth.stream.modes import requiring

FEWEST = 8
"""With fewer rows there are too few sign flips for a test at 5 %."""
HORIZON = 10
"""A site whose signal, if real, would need more than this many times the data counts as a no."""
COORDINATES = 64  # of the gradient, whose covariance is kept


@checked
def score(
    model: nn.Module | ResidualStream,
    data: Any,
    test: Any = None,
    *,
    at: Sequence[int] | None = None,
    alpha: Annotated[float, Setting(above=0, below=1)] = 0.05,
    seed: Seed = 0,
    init: str = "fresh",
    batch_size: int | None = None,
    criterion: Criterion | None = None,
    progress: bool = True,
    **options: Any,
) -> Score:
    """Score every site where a block could be inserted, in one forward and backward pass.

    data: labeled; at least 8 rows, and a few hundred to be useful. The gradient is the mean over
        these rows. Use training data to get a direction to train in, and rows the model has not
        been trained on to ask whether a deeper model would generalize better.
    test: rows whose mean gradient is compared with that of `data`.
    at: the sites to score; by default all legal ones.
    alpha: the chance of a false "deepen here" anywhere in the model.
    init: how candidate blocks are initialized, as in `insert`.
    criterion: your own loss, `f(prediction, labels, context)`, one number per row.

    The model is scored in eval mode (no dropout, batch norms with running statistics) and left
    unchanged. Inner batch norms of a fresh candidate take the statistics of the first batch.

    >>> found = ed.growth.score(model, valid, progress=False)
    >>> [site.after for site in found.sites]  # before the first block, and after each
    [0, 1, 2, 3]
    """
    stream = as_stream(model, **options)
    chosen = _checked_sites(stream, at)
    inner = unwrapped(stream.model)
    with evaluating(inner):
        candidates = {after: candidate(stream, after, seed=seed, init=init) for after in chosen}
        feed = Feed(data, stream, batch_size=batch_size)
        seen = _pass(stream, feed, candidates, criterion, progress)
        if seen.rows < FEWEST:
            raise BatchError(
                f"{seen.rows} rows are too few to tell a signal from noise or to estimate a "
                f"covariance; pass at least {FEWEST}, preferably a few hundred"
            )
        other = None
        if test is not None:
            feed = Feed(test, stream, batch_size=batch_size)
            other = _pass(stream, feed, {}, criterion, progress, chosen)
    return _judged(stream, seen, other, candidates, alpha, seed)


@dataclass
class _Seen:
    """Sums over the data; `loss` is its mean at last."""

    rows: int = 0
    labels: float = 0.0
    loss: float = 0.0
    pooled: dict[int, list[Tensor]] = field(default_factory=dict)
    sums: dict[int, GroupSums] = field(default_factory=dict)
    directions: dict[int, list[Direction]] = field(default_factory=dict)


def _pass(
    stream: ResidualStream,
    feed: Feed,
    candidates: dict[int, Candidate],
    criterion: Criterion | None,
    progress: bool,
    chosen: Sequence[int] = (),
) -> _Seen:
    seen = _Seen(sums={after: GroupSums(after) for after in candidates})
    depths = list(candidates) or list(chosen)
    parameters = unwrapped(stream.model).parameters()
    frozen = [p for p in parameters if not p.requires_grad and p.is_floating_point()]
    with requiring(frozen, True):  # at every state, even if the model is frozen
        for batch in feed.shown("scoring", progress):
            with differentiating():
                states = stream.observe(batch, calls=True)
                z, extras = states.logits(stream.depth), beside(states.output)
                losses, counts = row_losses(stream, z, batch, criterion, extras)
                check_finite(losses, "the loss", stream.depth)
                slopes = torch.autograd.grad(losses.sum(), [states.h[d] for d in depths])
            first = seen.rows
            seen.rows += len(losses)
            seen.loss += losses.sum().item()
            seen.labels += counts.sum().item()
            for depth, g in zip(depths, slopes, strict=True):
                pooled = summed_over_positions(g.detach()).double().cpu()
                check_finite(pooled, "the gradient", depth)  # a sum keeps every NaN and infinity
                seen.pooled.setdefault(depth, []).append(pooled)
                if depth not in candidates:
                    continue
                tried = candidates[depth]
                # Masks and positions are those of its neighbor, a block of the same kind.
                like, _ = template(stream, depth, None)
                h, call = states.h[depth].detach(), states.calls[like - 1]
                if first == 0:
                    settle(tried, call, h)
                _add(seen, tried, first, pairs(tried, call, h, g))
            del states, slopes
    seen.loss = mean_of(seen.loss, seen.labels)
    return seen


def _add(seen: _Seen, tried: Candidate, first: int, found: Sequence[Any]) -> None:
    own = seen.directions.setdefault(tried.after, [])
    for branch, (module, pair) in enumerate(zip(tried.maps, found, strict=True)):
        sums = seen.sums[tried.after]
        weight = sums.add(branch, first, pair.g, pair.phi, LinearMap(module).has_bias)
        bias = pair.g.sum((0, 1))
        if len(own) <= branch:
            own.append(Direction(weight, bias))
        else:
            own[branch].weight.add_(weight)
            own[branch].bias.add_(bias)


def _checked_sites(stream: ResidualStream, at: Sequence[int] | None) -> tuple[int, ...]:
    legal = sites(stream)
    if not legal:
        insert(stream, 0)  # raises, and says why
        raise UnsupportedModelError(f"no block can be inserted into {stream.name}")
    if at is not None and len(at) == 0:
        raise SettingError(f"at={at!r} names no site; use some of {', '.join(map(str, legal))}")
    for after in at or ():
        if stream.check_depth(after) not in legal:
            insert(stream, after)
    return legal if at is None else tuple(at)


def _judged(
    stream: ResidualStream,
    seen: _Seen,
    other: _Seen | None,
    candidates: dict[int, Candidate],
    alpha: float,
    seed: int,
) -> Score:
    groups = min(GROUPS, seen.rows)
    weight = seen.labels / groups
    grams = {after: sums.gram(groups, weight) for after, sums in seen.sums.items()}
    p, critical = adjusted_p(list(grams.values()), seed=seed)
    found: list[SiteScore] = []
    for (after, gram), p_site in zip(grams.items(), p, strict=True):
        directions = seen.directions[after]
        for direction in directions:
            direction.weight.div_(seen.labels)
            direction.bias.div_(seen.labels)
        squared = product(candidates[after], directions, directions)
        facts = evidence(gram, seed=seed)
        needed = _needed(facts.z, critical, seen.rows)
        verdict = DEEPEN if p_site <= alpha else UNSURE if needed is not None else NO
        g = torch.cat(seen.pooled[after]) * (seen.rows / seen.labels)
        test = None
        if other is not None:
            test = torch.cat(other.pooled[after]) * (other.rows / other.labels)
        found.append(
            SiteScore(
                after=after,
                norm=math.sqrt(squared),
                gain=facts.squared,
                low=facts.low,
                high=facts.high,
                z=facts.z,
                p=float(p_site),
                signal=float(g.mean(0).norm()),
                verdict=verdict,
                needed=None if verdict == DEEPEN else needed,
                alignment=None if test is None else alignment(g, test),
                covariance=covariance(g, seed=seed),
            )
        )
    return Score.of(
        found,
        candidates,
        seen.directions,
        model=stream.name,
        task=stream.task,
        depth=stream.depth,
        samples=seen.rows,
        loss=seen.loss,
        alpha=alpha,
    )


def _needed(z: float, critical: float, rows: int) -> int | None:
    """Rows for 90 % power: the z-score of a squared norm is proportional to the rows."""
    wanted = critical + NormalDist().inv_cdf(0.9)
    if z <= 0 or wanted / z > HORIZON:
        return None
    return max(math.ceil(rows * wanted / z), rows + 1)


def alignment(g: Tensor, test: Tensor) -> Alignment:
    """Cosine of the two mean gradients, and the bound of Theorem 5 on their disagreement."""
    a, b = g.mean(0), test.mean(0)
    n, m = len(g), len(test)
    cosine = float(a @ b / (a.norm() * b.norm()).clamp_min(1e-300))
    trace, top = spectrum(g)
    # Unbiased: the squared norm of a mean of n rows is too large by trace / n.
    mu = float(a @ a) - trace / n
    return Alignment(cosine, disagreement_bound(mu, top, trace, n, m), m)


def covariance(g: Tensor, *, seed: int = 0) -> Covariance:
    """A summary of the covariance, with the block of some coordinates."""
    trace, top = spectrum(g)
    width = g.shape[1]
    chosen = np.sort(np.random.default_rng(seed).permutation(width)[:COORDINATES])
    part = g[:, torch.from_numpy(chosen)]
    matrix = (part - part.mean(0)).T @ (part - part.mean(0)) / (len(g) - 1)
    scale = trace / width
    relative = (matrix / scale if scale > 0 else matrix).numpy()
    off = np.abs(relative[~np.eye(len(chosen), dtype=bool)])
    within = [float(np.mean(off <= limit)) if off.size else 1.0 for limit in (0.01, 0.1)]
    return Covariance(
        trace=trace,
        top=top,
        within_1=within[0],
        within_10=within[1],
        coordinates=tuple(chosen.tolist()),
        matrix=tuple(map(tuple, relative.tolist())),
    )
