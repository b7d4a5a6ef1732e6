"""The jumpboard: one step of the new block's last maps along their gradient."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn

from everydepth.config import Seed, Setting, checked
from everydepth.growth.candidates import Candidate, Direction, pairs, product, set_maps
from everydepth.growth.losses import mean_loss, mean_of, row_losses
from everydepth.growth.scoring import score
from everydepth.growth.sites import Score
from everydepth.stream import (
    Block,
    Criterion,
    Cursor,
    ResidualStream,
    as_stream,
    evaluating,
    first_tensor,
    unwrapped,
)
from everydepth.stream.feed import Feed
from everydepth.stream.insert import template
from everydepth.stream.maps import LinearMap
from everydepth.stream.taps import hooked

MOST = 12
"""Loss evaluations in one line search."""
FACTOR = 4.0  # between steps while longer ones help
ARMIJO = 1e-4  # share of the first-order decrease that a step must achieve


@dataclass(frozen=True)
class Jumpboard:
    """The old model after one step, or the old model itself if no step lowers the loss.

    eta: the step size; 0 if none was found. tried: each step size evaluated, with its training
    loss. margin: `D = L_S(old) - L_S(jump)` on the training data; margin_valid: on held-out data.
    slope: the first-order decrease in loss per unit of eta.
    """

    stream: ResidualStream = field(repr=False)
    after: int
    eta: float
    slope: float
    loss: float
    margin: float
    margin_valid: float | None
    tried: tuple[tuple[float, float], ...]

    @property
    def model(self) -> nn.Module:
        return self.stream.model

    @property
    def found(self) -> bool:
        return self.eta > 0

    def __str__(self) -> str:
        if not self.found:
            return (
                f"after {self.after}: none of {len(self.tried)} steps lowers the loss; the old "
                "model is kept"
            )
        held = "" if self.margin_valid is None else f", held-out {self.margin_valid:+.4g}"
        return (
            f"after {self.after}: loss {self.loss:.4g} -> {self.loss - self.margin:.4g} by eta "
            f"{self.eta:.3g} ({len(self.tried)} evaluations{held})"
        )


@checked
def jumpboard(
    model: nn.Module | ResidualStream,
    data: Any,
    valid: Any = None,
    *,
    after: int | None = None,
    scored: Score | None = None,
    precondition: bool = False,
    evaluations: Annotated[int, Setting(least=2)] = MOST,
    seed: Seed = 0,
    batch_size: int | None = None,
    criterion: Criterion | None = None,
    progress: bool = False,
    **options: Any,
) -> Jumpboard:
    """Insert a block and set its last maps to `A = -eta G`, with eta found by a line search.

    after: the site; by default the best of `scored`, or of a new score if that is None.
    precondition: use `A = -eta G C^-1`, with `C` the covariance of the features plus a small ridge.
    evaluations: the most times the loss is computed.

    The first step changes the stream by a tenth. It is made four times longer while that helps, or
    shortened until it does, then refined by parabolas in log eta.

    >>> jump = ed.growth.jumpboard(model, valid, test, after=3, progress=False)
    >>> ed.as_stream(jump.model).depth  # 3 if no step lowers the loss
    4
    """
    stream = as_stream(model, **options)
    if isinstance(data, Iterator):
        data = list(cast(Iterator[Any], data))  # iterated several times
    feed = Feed(data, stream, batch_size=batch_size)
    if scored is None:
        sites = None if after is None else [after]
        scored = score(
            stream,
            data,
            at=sites,
            seed=seed,
            criterion=criterion,
            batch_size=batch_size,
            progress=progress,
        )
    site = scored.best.after if after is None else scored.at(after).after
    tried, directions = scored.candidates[site], scored.directions[site]
    steps = _preconditioned(tried, stream, feed, directions) if precondition else directions
    slope = product(tried, directions, steps)
    line = _Line(tried, feed, criterion, steps)
    with evaluating(tried.model):
        try:
            first = line.first_step()
            eta, history = line_search(line, scored.loss, slope, first, most=evaluations)
            set_maps(tried, steps, eta)
            grown = as_stream(copy.deepcopy(tried.model), **stream.options) if eta else stream
        finally:
            set_maps(tried, steps, 0.0)
    if eta:
        _identify_norms(grown, grown.blocks[site], feed)
        grown.model.train(unwrapped(stream.model).training)
    best = min([loss for step, loss in history if step == eta], default=scored.loss)
    held = None
    if valid is not None:
        settings = {"criterion": criterion, "batch_size": batch_size}
        before = mean_loss(stream, valid, **settings)
        held = before - mean_loss(grown, valid, **settings) if eta else 0.0
    return Jumpboard(
        stream=grown,
        after=site,
        eta=eta,
        slope=slope,
        loss=scored.loss,
        margin=scored.loss - best if eta else 0.0,
        margin_valid=held,
        tried=tuple(history),
    )


def best_jumpboard(
    stream: ResidualStream, data: Any, other: Any, sites: Sequence[int], **settings: Any
) -> tuple[Jumpboard, list[Jumpboard]]:
    """The jumpboard that gains most on other data, and all of them, one per site."""
    jumps = [jumpboard(stream, data, other, after=site, **settings) for site in sites]
    return max(jumps, key=lambda jump: jump.margin_valid or 0.0), jumps


def line_search(
    loss: Callable[[float], float],
    start: float,
    slope: float,
    first: float,
    *,
    most: int = MOST,
) -> tuple[float, list[tuple[float, float]]]:
    """The best step found (0 if none meets Armijo's condition), and all that were tried.

    start: the loss at 0. slope: its negative derivative there.
    """
    seen: dict[float, float] = {}

    def value(eta: float) -> float:
        if eta not in seen:
            found = loss(eta)
            seen[eta] = found if math.isfinite(found) else math.inf
        return seen[eta]

    def good(eta: float) -> bool:
        return value(eta) <= start - ARMIJO * eta * slope and value(eta) < start

    eta = first
    if slope <= 0:
        return 0.0, []
    if good(eta):
        while len(seen) < most and value(eta * FACTOR) < value(eta):
            eta *= FACTOR
    else:
        while len(seen) < most and not good(eta):
            eta = _shorter(eta, value(eta) - start, slope)
            value(eta)
        if not good(eta):
            return 0.0, list(seen.items())
    while len(seen) < most:
        following = _parabola(seen)
        if following is None:
            break
        value(following)
    best = min((e for e in seen if good(e)), key=lambda e: seen[e], default=0.0)
    return best, list(seen.items())


def _shorter(eta: float, rise: float, slope: float) -> float:
    """The minimum of the parabola given by the start, its slope and a step that was too long."""
    if not math.isfinite(rise):
        return eta / 10
    guess = slope * eta**2 / (2 * (rise + slope * eta))
    return min(max(guess, eta / 100), eta / 2)


def _parabola(seen: dict[float, float]) -> float | None:
    """The minimum of the parabola, in log eta, through the best step and its neighbors."""
    etas = sorted(seen)
    best = min(range(len(etas)), key=lambda i: seen[etas[i]])
    if best == 0:
        return etas[0] / FACTOR
    if best == len(etas) - 1:
        return etas[-1] * FACTOR
    x = [math.log(etas[best + i]) for i in (-1, 0, 1)]
    y = [seen[etas[best + i]] for i in (-1, 0, 1)]
    wide = 0 if x[1] - x[0] > x[2] - x[1] else 2
    if max(x[1] - x[0], x[2] - x[1]) < 0.05:
        return None
    middle = math.exp((x[1] + x[wide]) / 2)
    if not all(map(math.isfinite, y)):
        return middle
    a, b = (x[1] - x[0]) * (y[1] - y[2]), (x[1] - x[2]) * (y[1] - y[0])
    if a == b:
        return middle
    low = x[1] - 0.5 * ((x[1] - x[0]) * a - (x[1] - x[2]) * b) / (a - b)
    near = min(abs(low - p) for p in x)
    # A step next to a known one adds nothing: halve the wider side instead.
    return middle if near < 0.02 or not x[0] < low < x[2] else math.exp(low)


class _Line:
    """The training loss as a function of eta; everything before the new block runs once."""

    def __init__(
        self,
        tried: Candidate,
        feed: Feed,
        criterion: Criterion | None,
        directions: Sequence[Direction],
    ) -> None:
        self._tried, self._directions, self._criterion = tried, directions, criterion
        self._stream = tried.stream
        with torch.no_grad(), evaluating(tried.model):
            self._cursors = [self._at_site(batch) for batch in feed]

    def _at_site(self, batch: Any) -> Cursor:
        return self._stream.advance(self._stream.start(batch), self._tried.after)

    @torch.no_grad()
    def __call__(self, eta: float) -> float:
        set_maps(self._tried, self._directions, eta)
        total = count = 0.0
        for cursor in self._cursors:
            end = self._stream.advance(cursor)
            extras = self._stream.extras(end.h, end.depth, end.batch)
            losses, counts = row_losses(
                self._stream, self._stream.logits(end), end.batch, self._criterion, extras
            )
            total += losses.double().sum().item()
            count += counts.double().sum().item()
        return mean_of(total, count)

    @torch.no_grad()
    def first_step(self) -> float:
        """The eta at which the new block changes the stream by a tenth of its norm."""
        cursor, eta = self._cursors[0], 1.0
        for _ in range(2):  # the second time, eta is small enough for the block to be near linear
            set_maps(self._tried, self._directions, eta)
            block = self._tried.block
            output = cursor.calls[cursor.depth](block.module, cursor.h)
            after = block.after(cursor.h, first_tensor(output))
            change = ((after - cursor.h).norm() / cursor.h.norm().clamp_min(1e-30)).item()
            eta *= 0.1 / change if math.isfinite(change) and change > 0 else 1e-3
        return eta


def _preconditioned(
    tried: Candidate, stream: ResidualStream, feed: Feed, directions: Sequence[Direction]
) -> list[Direction]:
    """`G C^-1`, with `C` the second moment of the features; a bias counts as a constant one."""
    moments: list[Tensor] = []
    inner = unwrapped(stream.model)
    with torch.no_grad(), evaluating(inner):
        for batch in feed:
            cursor = stream.advance(stream.start(batch), tried.after)
            like, _ = template(stream, tried.after, None)
            call, h = cursor.calls[like - 1], cursor.h
            for i, pair in enumerate(pairs(tried, call, h, torch.zeros_like(h))):
                phi = pair.phi.flatten(0, 1).double()
                if LinearMap(tried.maps[i]).has_bias:
                    phi = torch.cat([phi, torch.ones_like(phi[:, :1])], 1)
                moment = phi.T @ phi
                if i < len(moments):
                    moments[i].add_(moment)
                else:
                    moments.append(moment)
    found: list[Direction] = []
    for module, direction, moment in zip(tried.maps, directions, moments, strict=True):
        with_bias = LinearMap(module).has_bias
        g = direction.weight.double()
        if with_bias:
            g = torch.cat([g, direction.bias.double()[:, None]], 1)
        # Scaled to keep about the size of G; a ridge of 1 % bounds the effect of rare features.
        scale = moment.trace() / len(moment)
        eye = torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
        solved = torch.linalg.solve(moment / scale + 0.01 * eye, g.T).T.to(direction.weight.dtype)
        weight, bias = (solved[:, :-1], solved[:, -1]) if with_bias else (solved, direction.bias)
        found.append(Direction(weight, bias))
    return found


@torch.no_grad()
def _identify_norms(stream: ResidualStream, block: Block, feed: Feed) -> None:
    """Give the batch norm after a map the statistics of its input, and weights that undo them.

    In eval mode the norm remains an identity. In training mode it is now close to one, whereas
    statistics of 0 and 1 would have scaled the step up to size one.
    """
    watched = [(b.mixing, b.proj) for b in block.branches if b.mixing is not None]
    if not watched:
        return
    sums: dict[nn.Module, list[Any]] = {mixing: [0.0, 0.0, 0] for mixing, _ in watched}

    def see(module: nn.Module, _: Any, output: Tensor) -> None:
        values = output.double().transpose(0, 1).flatten(1)
        entry = sums[module]
        entry[0], entry[1] = entry[0] + values.sum(1), entry[1] + values.square().sum(1)
        entry[2] += values.shape[1]

    with evaluating(stream.model), hooked(*(m.register_forward_hook(see) for m, _ in watched)):
        for batch in feed:
            stream.called(batch)
    for mixing, proj in watched:
        norm: Any = proj
        total, squares, count = sums[mixing]
        mean = total / count
        variance = (squares / count - mean.square()).clamp_min(0)
        old = norm.weight / (norm.running_var + norm.eps).sqrt()
        norm.bias.add_((mean.to(norm.bias) - norm.running_mean) * old)
        norm.weight.copy_(old * (variance + norm.eps).sqrt().to(norm.weight))
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)
