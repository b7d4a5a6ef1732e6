"""Gradients of the loss with respect to the states: norms, mean, covariance, alignment."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from everydepth.config import checked
from everydepth.errors import SettingError
from everydepth.results.build import curve
from everydepth.results.result import Result, defined
from everydepth.stream.gradients import disagreement_bound, spectrum
from everydepth.tracing.metric import BatchMetric, Need, register_metric
from everydepth.tracing.metrics.contributions import by_branch
from everydepth.tracing.metrics.predictive import CLASSES, NUMBERS
from everydepth.tracing.observation import Observation
from everydepth.tracing.record import Trace
from everydepth.tracing.sums import DEPTH, array

GRADIENTS: frozenset[Need] = frozenset({"gradients", "labels"})
COORDINATES = 64  # evenly spaced coordinates whose covariance is computed
SPECTRUM_ROWS = 512  # samples used to estimate the largest variance


class _OfGradients(BatchMetric):
    section = "gradients"
    group = "gradients"
    needs = GRADIENTS
    tasks = CLASSES | NUMBERS
    default = False
    keep = 2**25


@register_metric
class GradientNorm(_OfGradients):
    """Mean over samples of `||dLoss/dh_l||`, also at the input of every branch of block l.

    Gradients are of each sample's own loss, with respect to all tokens of the state. Series are
    named after the branch: with attention and MLP branches, `attention` is the norm at `x_l` and
    `mlp` at `x~_l`.
    """

    name = "gradient_norm"
    title = "Gradient norm"
    about = "Norm of the gradient of each sample's loss at each depth; boxes show the samples."

    def __init__(self) -> None:
        super().__init__()
        self.branches: dict[tuple[str, int], float] = {}

    def update(self, observation: Observation) -> None:
        taps = observation.gradients
        assert taps is not None
        self.sums.add(norms=taps.state_norms.sum(1, dtype=torch.float64))
        self.rows += len(taps.losses)
        self.kept.add(taps.state_norms.T)
        for depth, block in enumerate(observation.stream.blocks, start=1):
            norms = taps.branch_norms[depth - 1]
            for name, norm in zip(block.names, norms, strict=False):
                key = (name, depth)
                self.branches[key] = self.branches.get(key, 0.0) + float(norm.double().sum())

    def compute(self) -> Result:
        value = self.sums.array("norms") / self.rows
        sums = by_branch(self.branches, range(len(value)))
        taps = {name: column / self.rows for name, column in sums.items()}
        return self.over_depths(
            {"value": value, **taps},
            beside=self.kept.quantiles(),
            labels={
                "value": "at the state: ‖gradient of the loss‖ (nat per unit)",
                **{
                    n: f"where {n.replace('_', ' ')} reads: ‖gradient of the loss‖ (nat per unit)"
                    for n in taps
                },
            },
            meta={"samples": self.rows},
        )


@register_metric
class GradientMean(_OfGradients):
    """`||gbar_l||`, the norm of the mean gradient over samples.

    The gradient is summed over tokens or positions. Arrays `mean_<l>` are the mean vectors, which
    `gradient_alignment` compares between two traces.
    """

    name = "gradient_mean"
    title = "Mean gradient"
    about = "Norm of the gradient averaged over samples: the change they agree on."

    def __init__(self) -> None:
        super().__init__()
        self.first: list[list[Tensor]] = []

    def update(self, observation: Observation) -> None:
        taps = observation.gradients
        assert taps is not None
        vectors = taps.vectors
        self.sums.add(
            squares=torch.stack([g.double().square().sum() for g in vectors]),
            **{f"mean_{i}": g.sum(0, dtype=torch.float64) for i, g in enumerate(vectors)},
        )
        room = max(SPECTRUM_ROWS - self.rows, 0)
        if room:
            self.first.append([g[:room].clone() for g in vectors])
        self.rows += len(taps.losses)

    def compute(self) -> Result:
        found = {name: self.sums.array(name) / self.rows for name in self.sums}
        squares = found.pop("squares")
        norm = np.array([np.linalg.norm(mean) for mean in found.values()])
        largest = np.array([_largest(torch.cat(parts)) for parts in zip(*self.first, strict=True)])
        exact = self.rows <= SPECTRUM_ROWS
        return self.over_depths(
            {"value": norm},
            beside={
                "variance": np.maximum(squares - norm**2, 0),
                "largest_variance": largest,
                **found,
            },
            labels={
                "value": "‖mean gradient‖ (nat per unit)",
                "variance": "tr Σ",
                "largest_variance": "‖Σ‖",
            },
            meta={"samples": self.rows, "largest_variance_from": min(self.rows, SPECTRUM_ROWS)},
            note=None
            if exact
            else f"largest_variance is estimated from the first {SPECTRUM_ROWS} samples",
        )


def _largest(rows: Tensor) -> float:
    """The largest eigenvalue of the covariance over these samples, as a population."""
    return max(spectrum(rows)[1], 0.0) * (len(rows) - 1) / len(rows) if len(rows) > 1 else 0.0


@register_metric
class GradientCovariance(_OfGradients):
    """How close the covariance of the gradient's coordinates is to diagonal.

    within_1, within_10: the share of off-diagonal entries below 1 % and 10 % of the mean variance.
    noise_10: the same share for half the difference between the covariances of two halves of the
    samples, which is estimation noise. `covariance` (depth, i, j) is that of the evenly spaced
    `coordinates`; no dim x dim matrix is formed.

    pooled: sum over tokens or positions first. `GradientCovariance(pooled=False)` uses raw
        coordinates, as in Depth Expansion's Figure 1; summing introduces correlations.
    """

    name = "gradient_covariance"
    title = "Gradient covariance"
    about = "How close the covariance of the gradients is to diagonal."

    def __init__(self, coordinates: int = COORDINATES, pooled: bool = True) -> None:
        if coordinates < 2:
            raise SettingError(f"coordinates={coordinates}; use 2 or more")
        super().__init__()
        self.wanted, self.pooled = coordinates, pooled
        self.sizes: list[int] = []
        self.chosen: list[Tensor] = []

    def update(self, observation: Observation) -> None:
        taps = observation.gradients
        assert taps is not None
        rows = taps.vectors if self.pooled else [g.flatten(1) for g in taps.states]
        sizes = [g.shape[1] for g in rows]
        if not self.chosen:
            self.sizes = sizes
            self.chosen = [
                torch.linspace(0, size - 1, min(self.wanted, size)).round().long() for size in sizes
            ]
        elif sizes != self.sizes:
            raise SettingError(
                "batches with states of different sizes have no raw coordinates in common; pad to "
                "one length, or use pooled=True"
            )
        parts = [
            g[:, where.to(g.device)].double() for g, where in zip(rows, self.chosen, strict=True)
        ]
        for half in (0, 1):  # even and odd samples
            for i, part in enumerate(parts):
                own = part[(half - self.rows) % 2 :: 2]
                sums = {f"sum {half} {i}": own.sum(0), f"products {half} {i}": own.T @ own}
                self.sums.add(**sums)
        self.rows += len(taps.losses)

    def _half(self, half: int, depth: int) -> tuple[int, Tensor, Tensor]:
        """The count, sum and products of the coordinates of even or odd samples."""
        names = f"sum {half} {depth}", f"products {half} {depth}"
        return (self.rows + 1 - half) // 2, self.sums[names[0]], self.sums[names[1]]

    def compute(self) -> Result:
        if self.rows < 2:
            return self.gap("a covariance needs 2 samples or more")
        n = self.rows
        both = [(self._half(0, i), self._half(1, i)) for i in range(len(self.chosen))]
        matrices = [_covariance(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in both]
        apart = [(_covariance(*a) - _covariance(*b)) / 2 for a, b in both]
        edges = np.array([-np.inf, *np.linspace(-1, 1, 41), np.inf])
        shares, counts = np.full((3, len(matrices)), np.nan), np.zeros((len(matrices), 42))
        for i, (matrix, noise) in enumerate(zip(matrices, apart, strict=True)):
            mean = np.trace(matrix) / len(matrix)
            if mean <= 0 or len(matrix) < 2:
                continue
            off = matrix[~np.eye(len(matrix), dtype=bool)] / mean
            chance = noise[~np.eye(len(matrix), dtype=bool)] / mean
            shares[:2, i] = [(np.abs(off) <= bound).mean() for bound in (0.01, 0.1)]
            shares[2, i] = (np.abs(chance) <= 0.1).mean()
            counts[i] = np.histogram(off, edges)[0]
        width = max(map(len, matrices))
        heat = np.full((len(matrices), width, width), np.nan)
        where = np.full((len(matrices), width), -1)
        for i, (matrix, coordinates) in enumerate(zip(matrices, self.chosen, strict=True)):
            heat[i, : len(matrix), : len(matrix)] = matrix
            where[i, : len(matrix)] = array(coordinates)
        return self.over_depths(
            {"within_10": shares[1], "within_1": shares[0], "noise_10": shares[2]},
            beside={
                "covariance": defined(heat),
                "coordinates": where,
                "counts": counts,
                "edges": edges[1:-1],
            },
            labels={
                "within_10": "off-diagonal below 10 % of the mean variance (share)",
                "within_1": "off-diagonal below 1 % of the mean variance (share)",
                "noise_10": "the same below 10 %, noise alone (share)",
                "edges": "covariance / mean variance",
                "maps": "coordinate of the gradient",
            },
            meta={
                "samples": n,
                "coordinates": width,
                "maps": "covariance",
                "pooled": self.pooled,
            },
        )


def _covariance(n: int, total: Tensor, products: Tensor) -> np.ndarray:
    return array(products / n - torch.outer(total, total) / n**2)


def _of_population(variance: float, samples: int) -> float:
    """An unbiased estimate, from the variance of these samples; one sample says nothing."""
    return float(variance) * samples / (samples - 1) if samples > 1 else math.inf


@checked
def gradient_alignment(train: Trace, test: Trace) -> Result:
    """Whether the mean gradients of two data sets point the same way, at every depth.

    Both traces need the metric `gradient_mean` of the same model. `bound` is an upper bound on the
    probability that they do not, with `mu` and `Sigma` estimated from the first trace.

    >>> a, b = (ed.trace(model, rows, ["gradient_mean"], progress=False) for rows in (valid, test))
    >>> from everydepth.tracing import gradient_alignment
    >>> gradient_alignment(a, b).value.shape  # a cosine at depths 0..3
    (4,)
    """
    a, b = train.result("gradient_mean"), test.result("gradient_mean")
    last = len(a.arrays["depth"]) - 1
    if len(b.arrays["depth"]) - 1 != last:
        raise SettingError(
            f"the traces have {last} and {len(b.arrays['depth']) - 1} blocks; trace one model on "
            "both data sets"
        )
    n, m = a.meta["samples"], b.meta["samples"]
    cosine, bound = np.full(last + 1, np.nan), np.full(last + 1, np.nan)
    for i in range(last + 1):
        x, y = a.arrays[f"mean_{i}"], b.arrays[f"mean_{i}"]
        if x.shape != y.shape:
            raise SettingError(
                f"the gradients at depth {i} have {len(x)} and {len(y)} coordinates; trace one "
                "model on both data sets"
            )
        lengths = np.linalg.norm(x) * np.linalg.norm(y)
        if lengths > 0:
            cosine[i] = x @ y / lengths
        # The traces have the variance of the samples; the theorem asks for the population's.
        trace = _of_population(a.arrays["variance"][i], n)
        top = _of_population(a.arrays["largest_variance"][i], a.meta["largest_variance_from"])
        # Unbiased: the squared norm of a mean of n rows is too large by trace / n.
        mu = float(a.value[i]) ** 2 - trace / n
        bound[i] = disagreement_bound(mu, top, trace, n, m)
    where = ", ".join(map(str, np.flatnonzero(np.isnan(cosine))))
    return curve(
        "gradient_alignment",
        range(last + 1),
        {"cosine": cosine, "bound": bound},
        title="Gradient alignment",
        about="Whether the mean gradients of two data sets point the same way.",
        section="gradients",
        labels={
            "depth": DEPTH,
            "cosine": "cosine of the two mean gradients",
            "bound": "bound on the probability of disagreement (share)",
        },
        meta={"samples": [n, m]},
        note=f"a mean gradient is zero at depth {where}" if where else None,
    )
