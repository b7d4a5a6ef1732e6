"""The generalization term of Depth Expansion, and the bounds made of it (Theorems 1 to 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from everydepth.errors import SettingError
from everydepth.growth.lipschitz import NetworkConstants

CROSS_ENTROPY = math.sqrt(2)
"""Lipschitz constant of softmax cross-entropy in the logits."""


def log_covering(constants: NetworkConstants, eps: float) -> float:
    """`log N = sum_l p_l log(1 + 2 R_l L K_l / eps)` (Lemma 1)."""
    depth = len(constants.blocks)
    total = 0.0
    behind = math.log(max(constants.top, 1e-300))  # Lip(top) prod_{j>l} kappa_j (1 + Lip_x,j)
    for block in reversed(constants.blocks):
        k = behind + block.kappa + block.lip_theta
        inside = math.log(2 * max(block.radius, 1e-300) * depth) + k - math.log(eps)
        total += block.parameters * _log1p_exp(inside)
        behind += block.kappa + block.lip_x
    return total


def rademacher(constants: NetworkConstants, n: int, *, bound: float, lipschitz: float) -> float:
    """`Rad <= L_loss eps + M sqrt(2 log N / n)` with `eps = 1/n`."""
    if n < 1:
        raise SettingError(f"n={n}; use the number of samples, 1 or more")
    eps = 1 / n
    return lipschitz * eps + bound * math.sqrt(2 * log_covering(constants, eps) / n)


def gamma(
    constants: NetworkConstants, n: int, delta: float, *, bound: float, lipschitz: float
) -> float:
    """`Gamma_n(delta) = 2 Rad + 3 M sqrt(log(2/delta) / (2n))`."""
    rad = rademacher(constants, n, bound=bound, lipschitz=lipschitz)
    return 2 * rad + 3 * bound * math.sqrt(math.log(2 / delta) / (2 * n))


@dataclass(frozen=True)
class Theorem:
    """`change`: an upper bound on new risk minus old risk. It says something only below zero."""

    name: str
    change: float
    probability: float

    @property
    def vacuous(self) -> bool:
        return self.change >= 0 or self.probability <= 0

    def __str__(self) -> str:
        said = "vacuous" if self.vacuous else "says that the new model is better"
        odds = f"probability {self.probability:.3g}"
        return f"{self.name}: change <= {self.change:+.4g} ({odds}), {said}"


def theorems(
    *,
    margin: float,
    margin_test: float,
    gamma_opt: float,
    gamma_n: float,
    gamma_n_half: float,
    gamma_m: float,
    delta: float,
    m: int,
    bound: float,
) -> tuple[Theorem, Theorem, Theorem]:
    """Theorems 1 to 3. `gamma_n_half` is `Gamma_n(delta/2)`."""
    miss = 3 * math.exp(-m * margin**2 / (8 * bound**2)) if margin > 0 else 3.0
    return (
        Theorem("Theorem 1 (population)", -margin - gamma_opt + 2 * gamma_n_half, 1 - delta),
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


def _log1p_exp(x: float) -> float:
    """`log(1 + e^x)` for any x."""
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))
