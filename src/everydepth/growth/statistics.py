"""Is a mean gradient more than noise? Sums over groups of samples, and tests built on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

GROUPS = 32
SKETCH = 32
EXACT = 4096
"""A map with more than `EXACT` entries is sketched: its inputs and outputs are projected at random
to `SKETCH` coordinates each."""

MARGIN = 1.25
"""Factor on p-values: means of small groups of skewed gradients are only nearly symmetric, and a
nominal 5 % must be an upper limit."""


class Sketch:
    """A random projection to at most `most` coordinates; it keeps inner products on average."""

    def __init__(self, width: int, seed: int, most: int = SKETCH) -> None:
        self.matrix: Tensor | None = None
        if width > most:
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randn(width, most, generator=generator, dtype=torch.float64)
            self.matrix = torch.linalg.qr(drawn).Q.mul_((width / most) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        if self.matrix is None:
            return x
        self.matrix = self.matrix.to(x)
        return x @ self.matrix


class GroupSums:
    """Gradients at one site, summed within groups: row i belongs to group i mod `GROUPS`.

    The `(out, in)` gradients of single rows are never held, only their sums in sketched
    coordinates. Group means are independent and, by the central limit theorem, near symmetric.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._sums: dict[str, Tensor] = {}
        self._sketches: dict[int, tuple[Sketch, Sketch]] = {}

    def add(
        self, branch: int, first: int, g: Tensor, phi: Tensor, bias: bool
    ) -> Float[Tensor, "out in"]:
        """Add the rows of one batch, starting at row `first`, and return their unsketched sum."""
        if branch not in self._sketches:
            seed = 2 * (self._seed * 1009 + branch)
            widths = g.shape[-1], phi.shape[-1]
            most = max(widths) if widths[0] * widths[1] <= EXACT else SKETCH
            left, right = (Sketch(w, seed + i, most) for i, w in enumerate(widths))
            self._sketches[branch] = left, right
        left, right = self._sketches[branch]
        gs, fs = left(g), right(phi)
        products = torch.bmm(gs.transpose(1, 2), fs)
        exact = left.matrix is None and right.matrix is None
        total = products.sum(0) if exact else g.flatten(0, 1).T @ phi.flatten(0, 1)
        self._sum(f"{branch} weight", first, products.flatten(1))
        if bias:
            self._sum(f"{branch} bias", first, gs.sum(1))
        return total

    def _sum(self, name: str, first: int, rows: Float[Tensor, "row entry"]) -> None:
        if name not in self._sums:
            self._sums[name] = rows.new_zeros(GROUPS, rows.shape[1], dtype=torch.float64)
        start = 0
        while start < len(rows):
            # Consecutive rows go to consecutive groups: no copy, no scatter.
            group = (first + start) % GROUPS
            count = min(GROUPS - group, len(rows) - start)
            self._sums[name][group : group + count] += rows[start : start + count]
            start += count

    def gram(self, groups: int, weight: float) -> Float[np.ndarray, "group group"]:
        """Inner products of group means, for the first `groups` groups of equal `weight`."""
        means = torch.cat([sums[:groups] / weight for sums in self._sums.values()], 1)
        return (means @ means.T).cpu().numpy()


@dataclass(frozen=True)
class Evidence:
    """Evidence about the mean gradient `E G` from inner products of group means.

    squared: an unbiased estimate of `||E G||^2`; it may be negative.
    z: this estimate divided by its standard error under `E G = 0`.
    low, high: a 95 % bootstrap interval of `||E G||^2`.
    """

    squared: float
    z: float
    low: float
    high: float


def evidence(gram: Float[np.ndarray, "group group"], *, seed: int = 0) -> Evidence:
    """The U-statistic over pairs of different groups, its z-score and its bootstrap."""
    k = len(gram)
    off = gram - np.diag(np.diag(gram))
    # Centering the group means leaves the noise alone, however strong the signal.
    centered = gram - gram.mean(0) - gram.mean(1)[:, None] + gram.mean()
    noise = centered - np.diag(np.diag(centered))
    spread = np.sqrt(2 * np.square(noise).sum())
    drawn = np.random.default_rng(seed).multinomial(k, np.full(k, 1 / k), size=1000)
    totals = ((drawn @ off) * drawn).sum(1)
    # Pairs of different groups only: a group paired with itself would add bias.
    pairs = np.square(drawn.sum(1)) - np.square(drawn).sum(1)
    low, high = np.quantile(totals / np.maximum(pairs, 1), [0.025, 0.975])
    z = float(off.sum() / spread) if spread > 0 else 0.0
    return Evidence(float(off.sum() / (k * (k - 1))), z, float(low), float(high))


def adjusted_p(
    grams: list[Float[np.ndarray, "group group"]], *, flips: int = 4000, seed: int = 0
) -> tuple[Float[np.ndarray, " site"], float]:
    """For each site, how often the best of *all* sites would score as high without any signal.

    The signs of group means are flipped at random for all sites together. This preserves the
    dependence between sites and corrects exactly for their number (Westfall and Young's max-T).
    Also returns the z-score at which the result is 5 %.
    """
    k = len(grams[0])
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(flips, k))
    found: list[float] = []
    null = np.full(flips, -np.inf)
    for gram in grams:
        off = gram - np.diag(np.diag(gram))
        spread = np.sqrt(2 * np.square(off).sum()) or 1.0
        null = np.maximum(null, ((signs @ off) * signs).sum(1) / spread)
        found.append(float(off.sum() / spread))
    p = np.array([(1 + np.sum(null >= z - 1e-12)) / (1 + flips) for z in found])
    return np.minimum(MARGIN * p, 1.0), float(np.quantile(null, 1 - 0.05 / MARGIN))
