"""The generalization term of Depth Expansion and the bounds built on it (Theorems 1 to 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from everydepth.errors import SettingError
from everydepth_papers.guarantees.lipschitz import NetworkConstants

CROSS_ENTROPY = math.sqrt(2)
"""Lipschitz constant of softmax cross-entropy in the logits."""


def log_covering(constants: NetworkConstants, eps: float, *, only: int | None = None) -> float:
    """`log N = sum_l p_l log(1 + 2 R_l L K_l / eps)` (Lemma 1).

    At `eps = 1/n` this is the effective dimension of App. F.1: `Gamma_n` falls as its root over n.
    only: the index of the one block that varies, with all others fixed (App. K).
    """
    varying = len(constants.blocks) if only is None else 1
    total = 0.0
    above = math.log(max(constants.top, 1e-300))  # Lip(top) prod_{j>l} kappa_j (1 + Lip_x,j)
    for index, block in reversed(list(enumerate(constants.blocks))):
        if only in (None, index):
            k = above + block.kappa + block.lip_theta
            inside = math.log(2 * max(block.radius, 1e-300) * varying) + k - math.log(eps)
            total += block.parameters * float(np.logaddexp(0, inside))
        above += block.kappa + block.lip_x
    return total


@dataclass(frozen=True, kw_only=True)
class Complexity:
    """The ingredients of `Gamma`, except the rows. bound: `M`. lipschitz: constant of the loss."""

    constants: NetworkConstants
    bound: float
    lipschitz: float
    only: int | None = None

    def rademacher(self, n: int) -> float:
        """`Rad <= L_loss eps + M sqrt(2 log N / n)` with `eps = 1/n`."""
        if n < 1:
            raise SettingError(f"n={n}; use the number of samples, 1 or more")
        covering = log_covering(self.constants, 1 / n, only=self.only)
        return self.lipschitz / n + self.bound * math.sqrt(2 * covering / n)

    def gamma(self, n: int, delta: float) -> float:
        """`Gamma_n(delta) = 2 Rad + 3 M sqrt(log(2/delta) / (2n))`."""
        return 2 * self.rademacher(n) + 3 * self.bound * math.sqrt(math.log(2 / delta) / (2 * n))

    def rows_needed(self, goal: float, delta: float) -> int:
        """The number of rows `n` at which `Gamma_n(delta)` falls to the goal (App. F.1)."""
        if goal <= 0:
            raise SettingError(f"goal={goal}; Gamma_n is above 0 for any number of rows")
        high = 1
        while self.gamma(high, delta) > goal:
            high *= 2
        low = high // 2
        while high - low > max(1, low // 1000):  # the constants do not deserve more precision
            middle = (low + high) // 2
            low, high = (middle, high) if self.gamma(middle, delta) > goal else (low, middle)
        return high


@dataclass(frozen=True)
class Theorem:
    """`change`: an upper bound on new risk minus old risk, vacuous unless it is below zero."""

    name: str
    change: float
    probability: float

    @property
    def vacuous(self) -> bool:
        return self.change >= 0 or self.probability <= 0

    def __str__(self) -> str:
        verdict = "vacuous" if self.vacuous else "the new model is better"
        odds = f"probability {self.probability:.3g}"
        return f"{self.name}: change <= {self.change:+.4g} ({odds}), {verdict}"


def theorems(
    *,
    margin: float,
    margin_test: float,
    gamma_opt: float,
    gamma_n: float,
    gamma_m: float,
    delta: float,
    m: int,
    bound: float,
) -> tuple[Theorem, Theorem, Theorem]:
    """Theorems 1 to 3. Each combines two events, which get `delta / 2` each.

    margin: a lower bound on the population margin, at confidence `1 - delta / 2`. gamma_n, gamma_m:
    `Gamma_n(delta / 2)` and `Gamma_m(delta / 2)`.
    """
    miss = 3 * math.exp(-m * margin**2 / (8 * bound**2)) if margin > 0 else 3.0
    return (
        Theorem("Theorem 1 (population)", -margin - gamma_opt + 2 * gamma_n, 1 - delta),
        Theorem(
            "Theorem 2 (test, by transfer)",
            -margin / 2 - gamma_opt + 2 * gamma_n,
            max(0.0, 1 - delta - miss),
        ),
        Theorem(
            "Theorem 3 (test, direct)",
            -margin_test - gamma_opt + 2 * (gamma_n + gamma_m),
            1 - delta,
        ),
    )
