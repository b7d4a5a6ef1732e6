"""Scaling laws: fit them with uncertainty, and plan depth, width and data for a budget.

>>> plan = ed.growth.scaling.plan(parameters=7e9)
>>> plan.depth, plan.width, f"{plan.tokens:.1e}"
(54, 3264, '...')
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float
from scipy.interpolate import make_interp_spline
from scipy.optimize import minimize
from scipy.special import huber

from everydepth.config import Seed, Setting, checked, filled
from everydepth.errors import DataError, SettingError
from everydepth.growth.config import PlanConfig
from everydepth.results import Results, curve, named, provenance, rows

Array = Float[np.ndarray, "..."]
_Count = Annotated[int, Setting(least=1)]
_Resamples = Annotated[int, Setting(least=0)]
DELTA = 1e-3
"""Threshold of the Huber loss on log residuals, as in Hoffmann et al. (2022)."""


class ScalingWarning(UserWarning):
    """A fit did not converge, or its starts disagree."""


@dataclass(frozen=True)
class Fit:
    """A fitted law.

    values: coefficients by name. intervals: their 95 % bootstrap intervals; None without bootstrap.
    loss: the mean objective at the optimum. agreeing: the share of starts that end within a
    relative 1e-4 of it.
    """

    law: str
    values: dict[str, float]
    intervals: dict[str, tuple[float, float]] | None
    loss: float
    points: int
    converged: bool
    agreeing: float

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def __call__(self, parameters: Any, tokens: Any = None) -> Any:
        """The predicted loss."""
        v = self.values
        loss = v["E"] + v["A"] * np.asarray(parameters, float) ** -v["alpha"]
        if self.law == "chinchilla":
            loss = loss + v["B"] * np.asarray(tokens, float) ** -v["beta"]
        return loss

    def __str__(self) -> str:
        spread = {
            n: f" ({low:.4g} to {high:.4g})" for n, (low, high) in (self.intervals or {}).items()
        }
        values = (f"{n} {value:.4g}{spread.get(n, '')}" for n, value in self.values.items())
        return f"{self.law}, {self.points} points: {', '.join(values)}"

    def to_json(self) -> dict[str, Any]:
        """As a dictionary; values unknown for a published law are None."""
        return {k: None if v != v else v for k, v in asdict(self).items()}


@checked
def fit(
    parameters: Sequence[float] | Array,
    loss: Sequence[float] | Array,
    tokens: Sequence[float] | Array | None = None,
    *,
    bootstrap: _Resamples = 0,
    starts: _Count = 40,
    delta: Annotated[float, Setting(least=1e-9, most=100)] = DELTA,
    seed: Seed = 0,
) -> Fit:
    """Fit `L = E + A / N^alpha + B / D^beta`, or without `tokens` `L = E + A / N^alpha`.

    Minimizes the Huber loss of the residuals of log L over log E, log A, log B and the exponents,
    from many starts. The objective is scaled up: a minimizer with default tolerances would stop at
    once. bootstrap: the number of resamples for intervals.
    """
    columns = [np.asarray(parameters, float), np.asarray(loss, float)]
    if tokens is not None:
        columns.append(np.asarray(tokens, float))
    names = ["E", "A", "alpha"] + (["B", "beta"] if tokens is not None else [])
    points = columns[0].size
    if len({column.shape for column in columns}) != 1 or columns[0].ndim != 1:
        raise DataError(f"columns of {[c.size for c in columns]} points; give equally many of each")
    if points <= len(names):
        raise DataError(
            f"{points} points for {len(names)} unknowns ({', '.join(names)}); "
            f"give more than {len(names)}, preferably {3 * len(names)}"
        )
    if not all(np.isfinite(c).all() and (c > 0).all() for c in columns):
        raise DataError("parameters, tokens and losses must be finite and above 0; drop the others")
    sizes = [np.log(columns[0])] + ([np.log(columns[2])] if tokens is not None else [])
    target = np.log(columns[1])
    random = np.random.default_rng(seed)
    guesses = _starts(target, sizes, starts, random)
    found = [_minimize(guess, sizes, target, delta) for guess in guesses]
    best = min(found, key=lambda item: item[1])
    equal = [x for x, value, _ in found if value <= best[1] * (1 + 1e-4) + 1e-12]
    agreeing = len(equal) / len(found)
    # If equally good optima differ in an exponent, the points do not determine the law.
    spread = max(float(np.ptp([x[2 + 2 * i] for x in equal])) for i in range(len(sizes)))
    converged = bool(best[2]) and spread < 0.05
    if not converged or len(equal) < 2:
        warnings.warn(
            f"the fit did not settle: {agreeing:.0%} of {len(found)} starts end equally well, with "
            f"exponents up to {spread:.2g} apart; give more points of other sizes, or more starts",
            ScalingWarning,
            stacklevel=2,
        )
    intervals = None
    if bootstrap:
        drawn = random.integers(points, size=(bootstrap, points))
        again = np.array(
            [_minimize(best[0], [s[i] for s in sizes], target[i], delta)[0] for i in drawn]
        )
        low, high = np.quantile([list(_named(x, names).values()) for x in again], [0.025, 0.975], 0)
        intervals = {n: (float(a), float(b)) for n, a, b in zip(names, low, high, strict=True)}
    law = "power law" if tokens is None else "chinchilla"
    return Fit(law, _named(best[0], names), intervals, best[1], points, converged, agreeing)


def _starts(
    target: Array, sizes: list[Array], count: int, random: np.random.Generator
) -> list[Array]:
    guesses: list[Array] = []
    for _ in range(max(count, 1)):
        guess = [target.min() + math.log(random.uniform(0.3, 1.0))]
        for size in sizes:
            exponent = random.uniform(0.1, 1.0)
            # The term has about the size of the excess loss in the middle of the points.
            excess = math.log(random.uniform(0.05, 1.0)) + target.mean()
            guess += [excess + exponent * float(np.median(size)), exponent]
        guesses.append(np.array(guess))
    return guesses


def _minimize(
    guess: Array, sizes: list[Array], target: Array, delta: float
) -> tuple[Array, float, bool]:
    scale = 1 / delta**2

    def objective(x: Array) -> tuple[float, Array]:
        terms = [np.full_like(target, x[0])]
        terms += [x[1 + 2 * i] - x[2 + 2 * i] * size for i, size in enumerate(sizes)]
        total = np.logaddexp.reduce(terms)
        residual = total - target
        slope = np.clip(residual, -delta, delta) * scale / len(target)
        shares = np.exp(np.stack(terms) - total) * slope
        gradient = [shares[0].sum()]
        for share, size in zip(shares[1:], sizes, strict=True):
            gradient += [share.sum(), -(share * size).sum()]
        return float(huber(delta, residual).mean() * scale), np.array(gradient)

    options = {"maxiter": 5000, "maxfun": 20000, "ftol": 1e-15, "gtol": 1e-9}
    result: Any = minimize(objective, guess, jac=True, method="L-BFGS-B", options=options)
    # A restart discards the curvature estimate, and often makes further progress.
    result = minimize(objective, result.x, jac=True, method="L-BFGS-B", options=options)
    flat = float(np.abs(objective(result.x)[1]).max()) < 1e-2
    return result.x, float(result.fun), bool(result.success or flat)


def _named(x: Array, names: list[str]) -> dict[str, float]:
    logs = {"E", "A", "B"}
    return {n: float(math.exp(v) if n in logs else v) for n, v in zip(names, x, strict=True)}


# -- planning -------------------------------------------------------------------------------------

LEVINE = (
    ("GPT-3 Small", 125e6, 12, 768, 23, 555),
    ("GPT-3 Medium", 350e6, 24, 1024, 32, 886),
    ("GPT-3 Large", 760e6, 24, 1536, 38, 1220),
    ("GPT-3 XL", 1.3e9, 24, 2048, 42, 1550),
    ("GPT-3 2.7B", 2.7e9, 32, 2560, 47, 2110),
    ("GPT-3 6.7B", 6.7e9, 32, 4096, 54, 3150),
    ("GPT-3 13B", 13.0e9, 40, 5140, 60, 4200),
    ("GPT-3 175B", 175.0e9, 96, 12288, 80, 13500),
    ("Projected 1T", 1e12, None, None, 95, 30100),
)
"""Levine et al. (2020) as in Depth Expansion, App. O: model, parameters, trained depth and width,
projected depth and width."""

TRAINED = (
    ("LaMDA", 137e9, 168e9),
    ("GPT-3", 175e9, 300e9),
    ("Jurassic-1", 178e9, 300e9),
    ("Gopher", 280e9, 300e9),
    ("MT-NLG", 530e9, 270e9),
    ("Chinchilla", 70e9, 1.4e12),
)
"""Model, parameters and training tokens: Depth Expansion, Table 4."""

EXPONENTS = (
    ("Minimum over training curves", 0.50, 0.50),
    ("IsoFLOP profiles", 0.49, 0.51),
    ("Parametric loss model", 0.46, 0.54),
    ("Kaplan et al.", 0.73, 0.27),
)
"""Method, a and b in `N ~ C^a`, `D ~ C^b`: Depth Expansion, Table 5."""

EPOCH = Fit(
    "chinchilla",
    {"E": 1.8172, "A": 482.01, "alpha": 0.3478, "B": 2085.43, "beta": 0.3658},
    None,
    math.nan,
    240,
    True,
    math.nan,
)
"""The refit of Hoffmann et al.'s points published by Besiroglu et al. (2024)."""


@dataclass(frozen=True)
class Plan:
    """Sizes for a budget, and the nearest published models.

    flops: training cost, `6 N D`. loss: predicted by the law. depth, width: from Levine et al.'s
    projections, with `N = 12 depth width^2`. levine, trained: the nearest rows of the tables.
    """

    parameters: float
    tokens: float
    flops: float
    loss: float
    depth: int
    width: int
    levine: tuple[Any, ...]
    trained: tuple[Any, ...]
    exponents: tuple[float, float]

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters

    def __str__(self) -> str:
        name, n, depth, width, *projected = self.levine
        was = "not trained" if depth is None else f"trained {depth} x {width}"
        model, n_other, d_other = self.trained
        return "\n".join(
            [
                f"{self.parameters:.3g} parameters: depth {self.depth}, width {self.width}",
                f"{self.tokens:.3g} tokens ({self.tokens_per_parameter:.1f} per parameter), "
                f"{self.flops:.3g} FLOPs, predicted loss {self.loss:.3f}",
                f"nearest in Levine's table: {name} ({n:.3g}), {was}, "
                f"projected {projected[0]} x {projected[1]}",
                f"nearest trained model: {model} ({n_other:.3g}) on {d_other:.3g} tokens "
                f"({d_other / n_other:.1f} per parameter)",
                f"optimal N ~ C^{self.exponents[0]:.2f}, D ~ C^{self.exponents[1]:.2f}; "
                + "; ".join(f"{who} {a:.2f}/{b:.2f}" for who, a, b in EXPONENTS),
            ]
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_parameter": self.tokens_per_parameter}


@checked
def plan(config: PlanConfig | None = None, *, law: Fit = EPOCH, **settings: Any) -> Plan:
    """Depth, width and tokens for a number of parameters or a training budget in FLOPs.

    config, settings: a `PlanConfig`, or its fields by name: `plan(parameters=7e9)`.
    law: a law fitted with tokens; by default the published refit of the Chinchilla points.
    """
    asked: PlanConfig
    (asked,) = filled(settings, "plan", config or PlanConfig)
    if law.law != "chinchilla":
        raise SettingError(f"the law is {law.law!r}; fit one with tokens=")
    a, b = law["alpha"], law["beta"]
    share = b / (a + b)
    # The optimum for a budget C = 6ND is N = factor (C/6)^(b/(a+b)).
    factor = (a * law["A"] / (b * law["B"])) ** (1 / (a + b))
    flops, tokens = asked.flops, asked.tokens
    if flops is not None:
        n = factor * (flops / 6) ** share if tokens is None else flops / (6 * tokens)
        d = flops / (6 * n)
    else:
        assert asked.parameters is not None
        n = asked.parameters
        d = (n / factor) ** (1 / share) / n if tokens is None else tokens
    depth, width = shape(n, multiple=asked.multiple)

    def near(row: Any) -> float:
        return abs(math.log(row[1] / n))

    return Plan(
        parameters=n,
        tokens=d,
        flops=6 * n * d,
        loss=float(law(n, d)),
        depth=depth,
        width=width,
        levine=min(LEVINE, key=near),
        trained=min(TRAINED, key=near),
        exponents=(share, 1 - share),
    )


@checked
def shape(
    parameters: Annotated[float, Setting(above=0)], *, multiple: _Count = 64
) -> tuple[int, int]:
    """Depth and width from Levine et al.'s projections, log-linear in N between and beyond rows."""
    logs = np.log([row[1] for row in LEVINE])
    depth = make_interp_spline(logs, [row[4] for row in LEVINE], k=1)(math.log(parameters))
    whole = max(2, round(float(depth)))
    width = math.sqrt(parameters / (12 * whole))
    rounded = max(multiple, multiple * round(width / multiple)) if width >= multiple else width
    return whole, max(1, round(rounded))


@checked
def as_results(law: Fit, found: Plan, points: Mapping[str, Sequence[float]] | None) -> Results:
    """A law and a plan as Results. points: what the law was fitted to, if it was fitted."""
    intervals = law.intervals or {}
    lines = [
        (f"law: {name}", f"{value:.4g}", _spread(intervals.get(name)))
        for name, value in law.values.items()
    ]
    for name in ("parameters", "tokens", "flops", "depth", "width", "loss"):
        lines.append((f"plan: {name}", f"{float(getattr(found, name)):.4g}", ""))
    who, _, depth, width, *projected = found.levine
    trained = "not trained" if depth is None else f"trained {depth} x {width}"
    lines.append((f"nearest in Levine's table: {who}", trained, f"{projected[0]} x {projected[1]}"))
    who, size, tokens = found.trained
    lines.append((f"nearest trained: {who}", f"{size:.3g} parameters", f"{tokens:.3g} tokens"))
    what, value, more = zip(*lines, strict=True)
    measured = [
        rows(
            "plan",
            {"what": what, "value": value, "95 % interval, or projected": more},
            title="Scaling law and plan",
            about="Depth, width and data for a budget, from a law fitted to measured points.",
            note=None
            if law.converged
            else "the fit did not settle; give more points of other sizes",
            section="growth",
        )
    ]
    if points is not None:
        absent = [name for name in ("parameters", "tokens", "loss") if name not in points]
        if absent:
            raise SettingError(f"points without {absent[0]!r}; give parameters, tokens and loss")
        predicted = curve(
            "fit",
            law(points["parameters"], points["tokens"]),
            {"measured": points["loss"]},
            axis="predicted",
            kind="scatter",
            labels={"predicted": "predicted loss", "measured": "measured loss"},
            title="Predicted and measured loss",
            section="growth",
        )
        measured.append(predicted)
    about = provenance(fit=law.to_json(), plan=found.to_json())
    return Results(results=named(*measured), about=about, kind="scaling")


def _spread(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.4g} to {interval[1]:.4g}"
