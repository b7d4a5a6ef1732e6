"""Would a block help here? Every site's first-order signal from one pass over the data."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everydepth.config import Seed, checked
from everydepth.errors import BatchError, SettingError, UnsupportedModelError
from everydepth.growth.candidates import (
    Candidate,
    Direction,
    candidate,
    pairs,
    settle,
)
from everydepth.growth.losses import beside, check_finite, row_losses
from everydepth.growth.shown import measurements
from everydepth.growth.statistics import GROUPS, GroupSums, adjusted_p, evidence
from everydepth.results import Results, Table, provenance
from everydepth.stream import (
    Criterion,
    ResidualStream,
    as_stream,
    evaluating,
    insert,
    sites,
    unwrapped,
)
from everydepth.stream.feed import Feed
from everydepth.stream.gradients import disagreement_bound
from everydepth.stream.maps import LinearMap

FEWEST = 8
"""Rows below which signs cannot be flipped in enough ways to say anything at 5 %."""
HORIZON = 10
"""A site whose signal, if real, needs more than this many times the data counts as a no."""
DEEPEN, NO, UNSURE = "deepen here", "no", "not enough data"


@dataclass(frozen=True)
class Alignment:
    """Whether the mean gradients of training and test data point the same way.

    cosine: measured. bound: on the probability that their product is not positive; 1 where the
    bound says nothing. rows: of the test data.
    """

    cosine: float
    bound: float
    rows: int


@dataclass(frozen=True)
class Covariance:
    """Of the per-row gradients at a site; figures relative to the mean variance of a coordinate.

    trace, top: `tr Sigma` and `||Sigma||_2`. within_1, within_10: share of off-diagonal entries
    within 1 % and 10 % of the mean variance, among `coordinates` of them, chosen at random.
    """

    trace: float
    top: float
    within_1: float
    within_10: float
    coordinates: tuple[int, ...] = field(repr=False)
    matrix: tuple[tuple[float, ...], ...] = field(repr=False)


@dataclass(frozen=True)
class SiteScore:
    """One site. `after`: the depth behind which the block would go.

    norm: `||G||_F` (Condition 1), weight and bias of every branch's last map together.
    gain: an unbiased estimate of `||E G||^2`, the first-order decrease per unit step; with `low`
        and `high` its 95 % bootstrap interval.
    z: `gain` over its standard error without signal. p: how often the best of all sites would look
        like this without signal.
    signal: `||gbar||`, the gradient summed over tokens or positions.
    needed: rows at which a signal of this size would be seen in 9 of 10 cases; None if none is.
    """

    after: int
    norm: float
    gain: float
    low: float
    high: float
    z: float
    p: float
    signal: float
    verdict: str
    needed: int | None
    alignment: Alignment | None
    covariance: Covariance


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Score(Results, kind="growth_score"):
    """What `score` found at every site; `score["z"]` is an array over them.

    candidates, directions: the blocks it looked at, and their gradients; empty in a loaded one.
    """

    sites: tuple[SiteScore, ...] = ()
    candidates: Mapping[int, Candidate] = field(default_factory=dict[int, Candidate])
    directions: Mapping[int, list[Direction]] = field(default_factory=dict[int, list[Direction]])

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sites:  # loaded
            object.__setattr__(self, "sites", tuple(map(_site, self.about["sites"])))

    @classmethod
    def of(
        cls,
        sites: Sequence[SiteScore],
        *,
        candidates: Mapping[int, Candidate],
        directions: Mapping[int, list[Direction]],
        rows: int,
        **facts: Any,
    ) -> Score:
        """facts: those of `provenance`, the mean loss, and the level alpha."""
        content: dict[str, Any] = {
            "verdict": _verdict(sites),
            "rows": rows,
            "sites": [asdict(site) for site in sites],
        }
        return cls(
            results=measurements("growth_score", content),
            about=provenance(samples=rows, **facts, **content),
            sites=tuple(sites),
            candidates=candidates,
            directions=directions,
        )

    @property
    def loss(self) -> float:
        """The mean loss of the rows."""
        return float(self.about["loss"])

    def at(self, after: int) -> SiteScore:
        """The site behind depth `after`."""
        for site in self.sites:
            if site.after == after:
                return site
        raise SettingError(
            f"after={after} was not scored; use one of {[site.after for site in self.sites]}"
        )

    @property
    def best(self) -> SiteScore:
        """The site with the clearest signal."""
        return max(self.sites, key=lambda site: site.z)

    @property
    def ranked(self) -> tuple[SiteScore, ...]:
        """The sites worth deepening, the clearest first."""
        return _ranked(self.sites)

    @property
    def verdict(self) -> str:
        """What to do, in a sentence."""
        return _verdict(self.sites)

    def table(self, name: str | None = None) -> Table:
        """Every site, or the table of one measurement."""
        return super().table("sites" if name is None else name)

    def __str__(self) -> str:
        return f"{self.model}: {self.verdict} ({self.samples:,} rows, loss {self.loss:.4g})"


def _ranked(sites: Sequence[SiteScore]) -> tuple[SiteScore, ...]:
    good = [site for site in sites if site.verdict == DEEPEN]
    return tuple(sorted(good, key=lambda site: -site.z))


def _verdict(sites: Sequence[SiteScore]) -> str:
    good = _ranked(sites)
    if good:
        return f"{DEEPEN}: after {good[0].after}"
    needed = [site.needed for site in sites if site.verdict == UNSURE and site.needed is not None]
    if needed:
        return f"{UNSURE}: about {min(needed):,} rows would settle it"
    return "deepest model: no site has a first-order signal"


def _site(content: Mapping[str, Any]) -> SiteScore:
    """A site as `asdict` wrote it."""
    covariance = dict(content["covariance"])
    covariance["coordinates"] = tuple(covariance["coordinates"])
    covariance["matrix"] = tuple(map(tuple, covariance["matrix"]))
    told = content["alignment"]
    parts: dict[str, Any] = {
        "alignment": None if told is None else Alignment(**told),
        "covariance": Covariance(**covariance),
    }
    return SiteScore(**{**content, **parts})


@checked
def score(
    model: nn.Module | ResidualStream,
    data: Any,
    test: Any = None,
    *,
    at: Sequence[int] | None = None,
    alpha: float = 0.05,
    seed: Seed = 0,
    init: str = "fresh",
    batch_size: int | None = None,
    criterion: Criterion | None = None,
    progress: bool = True,
    **options: Any,
) -> Score:
    """Score every site at which a block could be inserted, from one forward and backward pass.

    data: with labels; 8 rows at least, some hundred to be of use. The gradient is the mean over
        them, so use training data for a direction to train in, and rows the model has not been
        trained on to ask whether a deeper model would generalize better.
    test: if given, how well the mean gradient agrees with that of these rows.
    at: the sites; by default all that are legal.
    alpha: the chance of a false "deepen" anywhere in the model.
    init: of the candidate blocks, as in `insert`.
    criterion: a loss of your own, `f(prediction, labels, context)`, one number per row.

    The model is scored in eval mode (no dropout, batch norms with running statistics), and is left
    as it was. Inner batch norms of a fresh candidate take the statistics of the first batch.

    >>> found = ed.growth.score(model, valid, progress=False)
    >>> [site.after for site in found.sites]  # a block before the first, and behind each
    [0, 1, 2, 3]
    """
    stream = as_stream(model, **options)
    chosen = _checked_sites(stream, at)
    if not 0 < alpha < 1:
        raise SettingError(f"alpha={alpha}; use a probability between 0 and 1, such as 0.05")
    inner = unwrapped(stream.model)
    with evaluating(inner):
        candidates = {after: candidate(stream, after, seed=seed, init=init) for after in chosen}
        feed = Feed(data, stream, batch_size=batch_size)
        seen = _pass(stream, feed, candidates, criterion, progress)
        if seen.rows < FEWEST:
            raise BatchError(
                f"{seen.rows} rows are too few to tell a signal from noise and to estimate a "
                f"covariance; pass at least {FEWEST}, better some hundred"
            )
        other = None
        if test is not None:
            feed = Feed(test, stream, batch_size=batch_size)
            other = _pass(stream, feed, {}, criterion, progress, chosen)
    return _judged(stream, seen, other, candidates, alpha, seed)


@dataclass
class _Seen:
    """Sums over the data."""

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
    with differentiable(unwrapped(stream.model)):
        for batch in feed.shown("scoring", progress):
            with torch.enable_grad():
                states = stream.observe(batch, calls=True)
                z, extras = states.logits(stream.depth), beside(states.output)
                losses, counts = row_losses(stream, z, batch, criterion, extras)
                check_finite(losses, "the loss", stream.depth)
                gradients = torch.autograd.grad(losses.sum(), [states.h[d] for d in depths])
            first = seen.rows
            seen.rows += len(losses)
            seen.loss += losses.sum().item()
            seen.labels += counts.sum().item()
            for depth, g in zip(depths, gradients, strict=True):
                pooled = _pooled(g)
                check_finite(pooled, "the gradient", depth)  # a sum shows every NaN and infinity
                seen.pooled.setdefault(depth, []).append(pooled)
                if depth not in candidates:
                    continue
                tried = candidates[depth]
                # Masks and positions as its neighbor gets them, which is of the same kind.
                h, call = states.h[depth].detach(), states.calls[max(depth - 1, 0)]
                if first == 0:
                    settle(tried, call, h)
                _add(seen, tried, first, pairs(tried, call, h, g))
            del states, gradients
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


def _pooled(g: Tensor) -> Tensor:
    """Per row, the gradient summed over tokens `(row, token, dim)` or pixels `(row, dim, y, x)`."""
    pooled = g.flatten(2).sum(2) if g.ndim == 4 else g.reshape(g.shape[0], -1, g.shape[-1]).sum(1)
    return pooled.detach().double().cpu()


@contextmanager
def differentiable(model: nn.Module) -> Generator[None, None, None]:
    """Gradients at every state, even of a model with frozen parameters."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    for parameter in frozen:
        parameter.requires_grad_()
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _checked_sites(stream: ResidualStream, at: Sequence[int] | None) -> tuple[int, ...]:
    legal = sites(stream)
    if not legal:
        insert(stream, 0)  # raises, with the reason of this family
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
        maps = candidates[after].maps
        squared = sum(
            d.squared(LinearMap(m).has_bias) for d, m in zip(directions, maps, strict=True)
        )
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
    loss = seen.loss / seen.labels
    return Score.of(
        found,
        candidates=candidates,
        directions=seen.directions,
        rows=seen.rows,
        model=stream.name,
        task=stream.task,
        depth=stream.depth,
        loss=loss,
        alpha=alpha,
    )


def _needed(z: float, critical: float, rows: int) -> int | None:
    """Rows for 90 % power: the z-score of a squared norm grows in proportion to the rows."""
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


def spectrum(g: Tensor) -> tuple[float, float]:
    """`tr Sigma` and `||Sigma||_2` of rows, by whichever Gram matrix is smaller."""
    centered = g - g.mean(0)
    small = centered @ centered.T if len(g) < g.shape[1] else centered.T @ centered
    small = small / (len(g) - 1)
    return float(small.trace()), float(torch.linalg.eigvalsh(small)[-1])


def covariance(g: Tensor, *, seed: int = 0, most: int = 64) -> Covariance:
    """A summary of the covariance that never holds more than a `most` x `most` part of it."""
    trace, top = spectrum(g)
    width = g.shape[1]
    chosen = np.sort(np.random.default_rng(seed).permutation(width)[:most])
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
