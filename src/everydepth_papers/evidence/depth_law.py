"""Depth Expansion's laws of loss against depth, width and rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from everydepth.errors import DataError, SettingError

Array = Float[np.ndarray, "..."]


def rows_to_agree(mu: float, top: float, trace: float, chance: float) -> float:
    """Samples on each side at which `disagreement_bound` falls to `chance` (App. M.5)."""
    if mu <= 0:
        return math.inf
    # 4 top trace u^2 + 8 top u = chance, with u = 1 / (n mu)
    return 2 * (2 * top + math.sqrt(4 * top**2 + top * trace * chance)) / (mu * chance)


@dataclass(frozen=True)
class DepthFit:
    """`D_{k+1} = D_k - a D_k^beta`: the excess over `floor` after k blocks.

    beta = 1 is exponential decay; beta > 1 a power law with exponent `1 / (beta - 1)`.
    """

    a: float
    beta: float
    floor: float
    intervals: dict[str, tuple[float, float]] | None

    def excess(self, first: float, k: Any) -> Any:
        """The bound on the excess, k blocks after it was `first`."""
        k = np.asarray(k, float)
        if abs(self.beta - 1) < 1e-6:
            return first * np.exp(-self.a * k)
        power = 1 - self.beta
        inside = first**power + self.a * (self.beta - 1) * k
        return np.maximum(inside, 0) ** (1 / power)

    def exponent(self, alpha: float) -> float:
        """The exponent of the excess in `N` if depth grows as `width^alpha` (Table 2)."""
        if self.beta <= 1:
            return math.inf
        return alpha / ((2 + alpha) * (self.beta - 1))

    def rows_to_see(
        self,
        first: float,
        k: float | int,
        *,
        signal: float,
        top: float,
        trace: float,
        chance: float = 0.05,
        width: float = 1.0,
    ) -> float:
        """Rows of training and of test data needed to see the gain of block k in both (App. M.5).

        chance: the allowed probability that the two mean gradients disagree. signal: the squared
        norm of the mean gradient where the excess was `first`; it falls as the excess to the power
        beta (Assumptions G and G'). width: relative to the measured network, since every active
        coordinate adds to the signal. top, trace: see `spectrum`.
        """
        left = float(self.excess(first, k)) / first
        return rows_to_agree(signal * left**self.beta * width, top, trace, chance)


def fit_depth(
    loss: Sequence[float] | Array, *, floor: float = 0.0, bootstrap: int = 0, seed: int = 0
) -> DepthFit:
    """Fit the decrease from block to block: `log(D_k - D_{k+1}) = log a + beta log D_k`.

    loss: at consecutive depths; steps at which it does not fall are left out.
    """
    excess = np.asarray(loss, float) - floor
    if excess.ndim != 1 or len(excess) < 4 or not (excess > 0).all():
        raise DataError(
            f"{excess.size} losses above the floor {floor}; give 4 or more, all above the floor"
        )
    x, fall = np.log(excess[:-1]), excess[:-1] - excess[1:]
    x, y = x[fall > 0], np.log(fall[fall > 0])
    if len(x) < 3:
        raise DataError(f"the loss falls in {len(x)} of {len(fall)} steps; 3 are needed for a fit")
    beta, log_a = np.polyfit(x, y, 1)
    intervals = None
    if bootstrap:
        random = np.random.default_rng(seed)
        drawn = [i for i in random.integers(len(x), size=(bootstrap, len(x))) if np.ptp(x[i]) > 0]
        again = np.array([np.polyfit(x[i], y[i], 1) for i in drawn])
        quantiles = np.quantile(np.stack([np.exp(again[:, 1]), again[:, 0]], 1), [0.025, 0.975], 0)
        intervals = {
            name: (float(low), float(high))
            for name, low, high in zip(("a", "beta"), *quantiles, strict=True)
        }
    return DepthFit(float(np.exp(log_a)), float(beta), floor, intervals)


@dataclass(frozen=True, kw_only=True)
class Coupling:
    """Depth tied to width, `depth = scale * width^alpha`, in `N = per_layer * width^2 * depth`.

    Proposition 1: the number of parameters then determines depth and width.
    alpha: 1 for linear coupling, less if width dominates. per_layer: 12 for a transformer.

    >>> from everydepth_papers.evidence.depth_law import Coupling
    >>> depth, width = Coupling(alpha=1.0, scale=1 / 64).at(125e6)
    >>> round(depth), round(width)
    (14, 874)
    """

    alpha: float
    scale: float = 1.0
    per_layer: float = 12.0

    def __post_init__(self) -> None:
        if min(self.alpha, self.scale, self.per_layer) <= 0:
            raise SettingError(f"{self}; use numbers above 0")

    def at(self, parameters: float) -> tuple[float, float]:
        """The depth and width for a number of parameters."""
        width = (parameters / (self.per_layer * self.scale)) ** (1 / (2 + self.alpha))
        return self.scale * width**self.alpha, width
