"""One transformer layer built, not trained, to a requested precision (One-Layer Transformer).

The theorem says that one attention layer and one position-wise ReLU layer reach any continuous map
of sequences on a compact domain. This is our way to do it with explicit weights. The paper's own,
heads that partition the input space and route to outputs, is not here: only its abstract was
available, which says neither how queries and keys tell the cells of the partition apart, nor how
many heads that takes, nor how an output is read off.

1. *Attention brings each token its context*, exactly up to e^-30. Positions are one-hot codes
   beside the token; head r has queries and keys that read only the codes, so sharp that token i
   attends to token i+r (or to token r) alone; its value is that token. One head per token brings
   the whole sequence, one head with uniform weights the mean, and a position-wise map needs none.
2. *The ReLU layer is a sum of ridge functions.* One hidden layer cannot make products, hence no
   bumps with compact support in more than one variable. But it makes every piecewise linear
   function of `v.u`, and the cosine series of a function of D variables is made of those alone:
   `prod_j cos(pi k_j u_j)` is a mean of `cos(pi (k_1 u_1 +- k_2 u_2 +- ...))`. So: samples on a
   grid, their cosine transform, the largest terms until the rest adds up to a share of the
   precision, all terms of one direction together interpolated at knots whose distance minimizes
   the number of units for the rest of the precision.
3. *Answers that depend on the position* need one such sum per position: units of position k get a
   large negative bias everywhere else and are exactly zero there.
4. *Verified before it is returned*, through the module's own forward, on points of another lattice,
   the corners and random points; a finer grid is tried until the precision is met.

What it costs: the grid has `n^D` points for D = tokens * dim variables (2 dim with the mean, dim
position-wise), and the number of units grows about as fast. That is the curse of dimension, and
no claim of the theorem says otherwise; `fit_single_layer` shows what training needs instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import psutil
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from everydepth.config import checked
from everydepth.errors import SettingError
from everydepth_papers.constructions.maps import Domain, SequenceMap
from everydepth_papers.constructions.single_layer import SingleLayer

Function = SequenceMap | Callable[[Tensor], Tensor]
Floats = NDArray[np.float64]

SIDES = (9, 17, 33, 65, 129, 257)
"""Grid points along a variable, tried in turn."""
SHARES = (16.0, 8.0, 4.0, 2.0, 1.0, 0.5, 0.25)
"""Times the precision: the sum of absolute values of what is left out, and of what the knots add.
Signs differ, so the error is usually far below these sums; the largest that verifies is kept."""
SCREEN = 16  # a layer that fails on every 16th point need not be tried on the others
SHARP = 30.0  # attention to any other token is e^-30


@dataclass(frozen=True, kw_only=True, eq=False)
class Constructed:
    """A layer and what is known of it.

    error: the largest error over `points` sequences; apart from the corners of the domain, none of
        them was used by the construction.
    side: grid points per variable; variables: D. directions: ridges; hidden: ReLU units.
    """

    layer: SingleLayer = field(repr=False)
    precision: float
    error: float
    points: int
    side: int
    variables: int
    directions: int
    hidden: int
    parameters: int
    nonzero: int


@checked
def construct(
    f: Function,
    domain: Domain | None = None,
    precision: float | int = 0.1,
    *,
    memory: int | None = None,
    points: int = 20_000,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Constructed:
    """One attention + ReLU layer within `precision` of `f` in the sup norm, without training.

    f: a `SequenceMap`, or any function `(batch, token, dim) -> (batch, token, outputs)`, which is
        then taken to depend on everything, in another way at every position.
    domain: of `f`; that of the map, if it has one.
    memory: bytes that the grid and the layer may take; by default half of what is free.
    points: of the lattice on which the result is verified.

    Raises `SettingError` before any grid is made that would not fit, and where no grid was enough.

    >>> from everydepth_papers.constructions import Domain, construct
    >>> found = construct(lambda x: x * x.flip(1), Domain(tokens=2), precision=0.1, points=2500)
    >>> found.error <= 0.1, type(found.layer.attention).__name__
    (True, 'MultiheadAttention')
    """
    map_ = as_map(f, domain)
    if not 0 < precision < math.inf:
        raise SettingError(f"precision {precision}; use a number above 0, such as 0.1")
    allowed = psutil.virtual_memory().available // 2 if memory is None else memory
    reader = _Reader(map_)
    _check_grid(reader, SIDES[0], allowed)
    _check_shifts(map_, seed)
    where = verification_points(map_.domain, points, seed)
    truth = map_(where)
    best, too_large = math.inf, ""
    for side in SIDES:
        _check_grid(reader, side, allowed, best, precision)
        series = _series(reader, side)
        before = math.inf
        for share in SHARES:
            plan = _plan(series, share * precision)
            size = 8 * plan.units * (reader.width + reader.outputs) * reader.groups
            if size > allowed:
                too_large = (
                    f"a layer of {plan.units * reader.groups:,} ReLU units needs {_bytes(size)}, "
                    f"but {_bytes(allowed)} may be used; "
                )
                break
            layer = _layer(reader, plan).to(dtype)
            error = sup_error(layer, where[::SCREEN], truth[::SCREEN])
            if error <= precision:
                error = sup_error(layer, where, truth)
            best = min(best, error)
            if error <= precision:
                return Constructed(
                    layer=layer,
                    precision=float(precision),
                    error=error,
                    points=len(where),
                    side=side,
                    variables=reader.variables,
                    directions=len(plan.directions),
                    hidden=layer.hidden.out_features,
                    parameters=layer.parameter_count,
                    nonzero=layer.nonzero_count,
                )
            # Terms left out and knots explain 2 * share * precision at most: an error above that,
            # which keeping more does not lower, is the grid's.
            if share <= 2 and 0.8 * before < error > 2 * share * precision:
                break
            before = error
    raise SettingError(
        f"precision {precision:g} was not met: the best of {len(SIDES)} grids has error "
        f"{best:.3g} ({map_.name}); {too_large or 'is it continuous? '}ask for a precision above "
        "that"
    )


@torch.no_grad()
def sup_error(
    layer: torch.nn.Module,
    x: Float[Tensor, "rows token dim"],
    truth: Float[Tensor, "rows token outputs"],
) -> float:
    """The largest absolute error over sequences, tokens and outputs."""
    parameter = next(layer.parameters())
    hidden: int = getattr(getattr(layer, "hidden", None), "out_features", 1024)
    rows = max(1, 2**19 // (hidden * x.shape[1]))  # 4 MB of activations: they stay in the cache
    worst = 0.0
    for part, right in zip(x.split(rows), truth.split(rows), strict=True):
        found = layer(part.to(parameter)).to(right)
        worst = max(worst, float((found - right).abs().max()))
    return worst


# -- the map to approximate ------------------------------------------------------------------------


def as_map(f: Function, domain: Domain | None) -> SequenceMap:
    """A plain function becomes a map about which nothing is assumed."""
    if isinstance(f, SequenceMap):
        if domain is None or domain == f.domain:
            return f
        return replace(f, domain=domain)
    if domain is None:
        raise SettingError("f is a plain function; say where: domain=Domain(tokens=3, dim=1)")
    name = getattr(f, "__name__", type(f).__name__)
    return SequenceMap(name=name, description="", domain=domain, function=f)


def verification_points(domain: Domain, points: int = 20_000, seed: int = 0) -> Tensor:
    """Sequences that no construction uses: an own lattice, random points, faces; and corners."""
    d = domain.variables
    side = max(2, int(points ** (1 / d) + 1e-9))
    # An irrational step: apart from the corners no point is one of a regular grid.
    line = np.linspace(0, 1, side) * (1 - 0.1 / math.pi / side) + 0.05 / math.pi / side
    lattice = np.array(np.meshgrid(*[line] * d, indexing="ij")).reshape(d, -1).T
    random = np.random.default_rng(seed)
    corners = random.integers(0, 2, (256, d)).astype(float)
    faces = random.uniform(size=(len(lattice) // 10 + 1, d))
    flat = np.arange(len(faces)), random.integers(0, d, len(faces))
    faces[flat] = faces[flat].round()
    anywhere = random.uniform(size=(len(lattice) // 10 + 1, d))
    unit = random.permutation(np.concatenate([lattice, corners, faces, anywhere]))
    x = domain.low + (domain.high - domain.low) * unit
    return torch.from_numpy(x).reshape(-1, domain.tokens, domain.dim)


def _check_shifts(map_: SequenceMap, seed: int) -> None:
    """Raise an error if a map with `shifts=True` does not commute with shifts."""
    if not map_.shifts:
        return
    d = map_.domain
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(64, d.tokens, d.dim, dtype=torch.float64, generator=generator)
    x = d.low + (d.high - d.low) * x
    apart = float((map_(x.roll(1, 1)) - map_(x).roll(1, 1)).abs().max())
    if apart > 1e-9:
        raise SettingError(
            f"{map_.name} says shifts=True, but shifting its input changes its output by "
            f"{apart:.3g}; use shifts=False"
        )


def _check_grid(
    reader: _Reader, side: int, allowed: int, best: float = math.inf, precision: float = 0.0
) -> None:
    # Samples, their transform and one copy of each, in float64.
    size = 4 * 8 * reader.outputs * reader.groups * side**reader.variables
    if size > allowed:
        so_far = f"; the finest grid before has error {best:.3g}" if best < math.inf else ""
        wanted = f" for precision {precision:g}" if precision else ""
        raise SettingError(
            f"a grid of {side}^{reader.variables} points{wanted} needs {_bytes(size)}, but "
            f"{_bytes(allowed)} may be used{so_far}; use fewer tokens or dimensions, "
            "a coarser precision, a map whose context is 'mean' or 'self', or pass memory="
        )


def _bytes(size: float | int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


# -- attention: which variables each token gets ----------------------------------------------------


class _Reader:
    """Where the variables of a map stand after the attention, and how to make samples of it.

    The state is `[token | position code | slots]`; attention writes into the slots, `dim` a head.
    """

    def __init__(self, map_: SequenceMap) -> None:
        self.map = map_
        d = map_.domain
        self.tokens, self.dim = d.tokens, d.dim
        context = map_.context if d.tokens > 1 else "self"
        self.context = context
        self.heads = {"self": 1, "mean": 1, "all": d.tokens}[context]
        self.variables = {"self": 1, "mean": 2, "all": d.tokens}[context] * d.dim
        self.groups = 1 if map_.shifts else d.tokens
        head = max(d.tokens, d.dim)
        while self.heads * head < self.slots + self.heads * d.dim:
            head += 1
        self.width = self.heads * head
        self.outputs = map_(self.samples(np.full((1, self.variables), 0.5), 0)).shape[-1]

    @property
    def slots(self) -> int:
        """The index of the first slot."""
        return self.dim + self.tokens

    def samples(self, unit: Floats, position: int) -> Tensor:
        """Sequences at whose token `position` the variables have these values in 0..1."""
        d = self.map.domain
        values = torch.from_numpy(d.low + (d.high - d.low) * unit).reshape(len(unit), -1, d.dim)
        if self.context == "all":
            # Relative places for a map that follows shifts; there position is 0 and both agree.
            return values
        x = values[:, -1:].expand(-1, d.tokens, -1).clone()
        x[:, position] = values[:, 0]
        return x

    def variable_map(self) -> tuple[Tensor, Tensor]:
        """`u = M z + m`: the variables, in 0..1, from the state after the attention."""
        d = self.map.domain
        matrix = torch.zeros(self.variables, self.width, dtype=torch.float64)
        eye = torch.eye(d.dim, dtype=torch.float64)
        if self.context == "all":
            for r in range(self.tokens):
                rows, start = slice(r * d.dim, (r + 1) * d.dim), self.slots + r * d.dim
                matrix[rows, start : start + d.dim] = eye
        else:
            matrix[: d.dim, : d.dim] = eye
            if self.context == "mean":  # of the others: (n mean - x_i) / (n - 1)
                n = self.tokens
                matrix[d.dim :, : d.dim] = -eye / (n - 1)
                matrix[d.dim :, self.slots : self.slots + d.dim] = eye * n / (n - 1)
        scale = 1 / (d.high - d.low)
        return scale * matrix, torch.full((self.variables,), -d.low * scale, dtype=torch.float64)

    def write(self, layer: SingleLayer) -> None:
        """Set the weights of the embedding and the attention."""
        for parameter in layer.parameters():
            parameter.zero_()
        dim, n, head = self.dim, self.tokens, self.width // self.heads
        layer.embed.weight[:dim] = torch.eye(dim, dtype=torch.float64)
        layer.positions[:, dim : dim + n] = torch.eye(n, dtype=torch.float64)
        if self.context == "self":
            return  # the skip already holds all that is needed
        attention = layer.attention
        query, key, value = attention.in_proj_weight.split(self.width)
        sharp = math.sqrt(head) * (SHARP + math.log(n))
        for r in range(self.heads):
            rows = r * head
            value[rows : rows + dim, :dim] = torch.eye(dim, dtype=torch.float64)
            out = self.slots + r * dim
            attention.out_proj.weight[out : out + dim, rows : rows + dim] = torch.eye(
                dim, dtype=torch.float64
            )
            if self.context == "mean":
                continue  # all scores zero: uniform weights
            for j in range(n):
                key[rows + j, dim + j] = 1.0
                if self.map.shifts:  # token i looks at i + r
                    query[rows + (j + r) % n, dim + j] = sharp
                else:  # every token looks at r: the codes of all positions add up to one
                    query[rows + r, dim + j] = sharp


# -- the ReLU layer: a sum of ridge functions ------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Series:
    """Cosine terms, the largest first.

    k: `(term, variable)`. coefficients: `(term, group, output)`. size: the largest of each term.
    alias: the size of the terms of the highest frequencies, a guess at what the grid missed.
    """

    k: NDArray[np.int64]
    coefficients: Floats
    size: Floats


def _series(reader: _Reader, side: int) -> _Series:
    from scipy.fft import dctn

    line = np.linspace(0, 1, side)
    axes = tuple(range(reader.variables))
    unit = np.array(np.meshgrid(*[line] * len(axes), indexing="ij")).reshape(len(axes), -1).T
    found: list[Floats] = []
    for position in range(reader.groups):
        values = np.empty((len(unit), reader.outputs))
        for start in range(0, len(unit), 2**16):
            part = reader.map(reader.samples(unit[start : start + 2**16], position))
            values[start : start + 2**16] = part[:, position].double().numpy()
        grid = values.reshape(*[side] * len(axes), reader.outputs)
        found.append(np.asarray(dctn(grid, type=1, axes=axes)).reshape(len(unit), -1))
    coefficients = np.stack(found, 1)  # (term, group, output)
    k = np.array(np.meshgrid(*[np.arange(side)] * len(axes), indexing="ij"))
    k = k.reshape(len(axes), -1).T
    ends = (k == 0) | (k == side - 1)
    coefficients *= np.prod(np.where(ends, 0.5, 1) / (side - 1), axis=1)[:, None, None]
    size = np.abs(coefficients).max((1, 2))
    order = np.argsort(-size, kind="stable")
    return _Series(k[order], coefficients[order], size[order])


@dataclass(frozen=True, eq=False)
class _Ridge:
    """`sum_g a_g cos(pi g t)` along `t = direction . u`; amplitudes `(harmonic, group, output)`."""

    direction: tuple[int, ...]
    harmonics: NDArray[np.int64]
    amplitudes: Floats
    knots: int

    @property
    def span(self) -> tuple[int, int]:
        """Smallest and largest t on the unit cube."""
        low = sum(min(v, 0) for v in self.direction)
        return low, low + sum(map(abs, self.direction))

    def values(self, t: Floats) -> Floats:
        """`(t, group, output)`."""
        waves = np.cos(math.pi * np.outer(t, self.harmonics))
        return np.tensordot(waves, self.amplitudes, 1)


@dataclass(frozen=True, eq=False)
class _Plan:
    constant: Floats  # (group, output)
    directions: tuple[_Ridge, ...]

    @property
    def units(self) -> int:
        return sum(ridge.knots for ridge in self.directions)


def _plan(series: _Series, allowed: float) -> _Plan:
    """Terms until the rest adds up to `allowed`; knots so that they add `allowed` at most."""
    tail = np.cumsum(series.size[::-1])[::-1]  # of this term and all smaller ones
    kept = int((tail > allowed).sum())
    constant = np.zeros(series.coefficients.shape[1:])
    grouped: dict[tuple[int, ...], dict[int, Floats]] = {}
    for k, c in zip(series.k[:kept].tolist(), series.coefficients[:kept], strict=True):
        used = [j for j, v in enumerate(k) if v]
        if not used:
            constant = constant + c
            continue
        g = math.gcd(*k)
        # cos a cos b = (cos(a+b) + cos(a-b)) / 2, once for every variable but the first.
        for signs in product((1, -1), repeat=len(used) - 1):
            v = [0] * len(k)
            for j, sign in zip(used, (1, *signs), strict=True):
                v[j] = sign * k[j] // g
            waves = grouped.setdefault(tuple(v), {})
            waves[g] = waves.get(g, 0) + c / 2 ** (len(used) - 1)
    ridges = [
        _Ridge(direction, np.array(list(waves)), np.array(list(waves.values())), 0)
        for direction, waves in grouped.items()
    ]
    return _Plan(constant, tuple(_with_knots(ridges, allowed)))


def _with_knots(ridges: list[_Ridge], allowed: float) -> list[_Ridge]:
    """The fewest knots in all for which interpolation adds at most `allowed`.

    Linear interpolation of `a cos(pi g t)` at distance h is off by `a (pi g h)^2 / 8`. Minimizing
    `sum T/h` under `sum B h^2 = allowed` gives `h ~ (T/B)^(1/3)`.
    """
    if not ridges:
        return []
    spans = np.array([b - a for a, b in (ridge.span for ridge in ridges)])
    bends = np.array(
        [
            (np.abs(r.amplitudes).max((1, 2)) * (math.pi * r.harmonics) ** 2 / 8).sum()
            for r in ridges
        ]
    )
    shape = (spans / bends) ** (1 / 3)
    h = shape * math.sqrt(allowed / float((bends * shape**2).sum()))
    knots = np.maximum(np.ceil(spans / h), 1).astype(int)
    return [
        _Ridge(r.direction, r.harmonics, r.amplitudes, int(n))
        for r, n in zip(ridges, knots, strict=True)
    ]


@torch.no_grad()
def _layer(reader: _Reader, plan: _Plan) -> SingleLayer:
    """The plan as weights."""
    units, groups = plan.units, reader.groups
    layer = SingleLayer(
        reader.map.domain,
        outputs=reader.outputs,
        width=reader.width,
        heads=reader.heads,
        hidden=max(units * groups, groups),
    ).double()
    reader.write(layer)
    matrix, offset = reader.variable_map()
    constant = plan.constant.copy()
    rows = np.zeros((units, reader.variables))
    bias, jumps = np.zeros(units), np.zeros((units, *constant.shape))
    reach = np.zeros(units)
    start = 0
    for ridge in plan.directions:
        low, high = ridge.span
        t = np.linspace(low, high, ridge.knots + 1)
        values = ridge.values(t)
        slopes = np.diff(values, axis=0) / (t[1] - t[0])
        here = slice(start, start + ridge.knots)
        rows[here] = ridge.direction
        bias[here] = -t[:-1]
        jumps[here] = np.diff(slopes, axis=0, prepend=0)  # a unit changes the slope at its knot
        reach[here] = high - t[:-1]
        constant += values[0]
        start += ridge.knots
    inner = torch.from_numpy(rows) @ matrix
    shift = torch.from_numpy(bias) + torch.from_numpy(rows) @ offset
    code = slice(reader.dim, reader.dim + reader.tokens)
    for group in range(groups):
        here = slice(group * units, (group + 1) * units)
        layer.hidden.weight[here] = inner
        layer.hidden.bias[here] = shift
        layer.out.weight[:, here] = torch.from_numpy(jumps[:, group].T.copy())
        if groups > 1:  # zero at every other position: more is taken off than a unit can reach
            off = torch.from_numpy(reach + 1)[:, None].expand(-1, reader.tokens).clone()
            off[:, group] = 0
            layer.hidden.weight[here, code] -= off
    if groups == 1:
        layer.out.bias.copy_(torch.from_numpy(constant[0]))
    else:
        _add_constants(layer, constant, code)
    return layer


def _add_constants(layer: SingleLayer, constant: Floats, code: slice) -> None:
    """A constant a position: one more unit each, which is 1 there and 0 elsewhere."""
    groups = len(constant)
    old = layer.hidden, layer.out
    size = old[0].out_features
    hidden = torch.nn.Linear(old[0].in_features, size + groups, dtype=torch.float64)
    out = torch.nn.Linear(size + groups, old[1].out_features, dtype=torch.float64)
    hidden.weight.zero_()
    hidden.bias.zero_()
    hidden.weight[:size], hidden.bias[:size] = old[0].weight, old[0].bias
    hidden.weight[size:, code] = torch.eye(groups, dtype=torch.float64)
    out.weight[:, :size] = old[1].weight
    out.weight[:, size:] = torch.from_numpy(constant.T.copy())
    out.bias.zero_()
    layer.hidden, layer.out = hidden, out
