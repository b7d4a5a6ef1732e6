"""The geometry of classes: neural collapse and distinguishability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from everydepth.results.result import Result
from everydepth.stream import IGNORE_INDEX
from everydepth.tracing.metric import FeatureMetric, register_metric
from everydepth.tracing.metrics.predictive import LABELS
from everydepth.tracing.metrics.similarity import NO_SECOND_LOOK
from everydepth.tracing.observation import FeatureRows
from everydepth.tracing.sums import array

RANK = 1e-10  # singular values of the class means below this share of the largest count as zero


@dataclass(frozen=True)
class ClassMeans:
    """Class means at one depth: classes seen, means (centered, too), and the basis they span."""

    seen: Tensor
    means: Tensor
    centered: Tensor
    basis: Tensor
    variances: Tensor  # eigenvalues of Sigma_B along the basis

    @staticmethod
    def of(sums: Tensor, counts: Tensor) -> ClassMeans:
        seen = counts > 0
        means = torch.zeros_like(sums)
        means[seen] = sums[seen] / counts[seen, None]
        centered = means[seen] - means[seen].mean(0)
        _, s, vh = torch.linalg.svd(centered, full_matrices=False)
        kept = s > RANK * s.max().clamp(min=torch.finfo(s.dtype).tiny)
        return ClassMeans(seen, means, centered, vh[kept], s[kept].square() / int(seen.sum()))


class _Structure(FeatureMetric):
    section = "structure"
    group = "structure"
    needs = LABELS
    tasks = frozenset({"classification"})


@register_metric
class NeuralCollapse(_Structure):
    """NC1, NC2 and NC3 at every depth, of the head's inputs (after the final norm).

    nc1: `tr(Sigma_W Sigma_B^+) / K`. nc2_norms: spread of the class means' lengths over their mean.
    nc2_angles: mean of |cos + 1/(K-1)| over pairs of class means. nc3: distance of the normalized
    head from the normalized class means. separation: `log tr(Sigma_W Sigma_B^+)`.
    """

    name = "neural_collapse"
    title = "Neural collapse"
    about = "How close features are to one point per class, all equally far apart; 0 is collapsed."
    passes = 2

    def __init__(self) -> None:
        super().__init__()
        self.head: Tensor | None = None
        self.means: list[ClassMeans] | None = None
        self.within: list[Tensor] = []
        self.second_rows = 0

    def update(self, rows: FeatureRows) -> None:
        assert rows.targets is not None
        labeled = rows.targets != IGNORE_INDEX
        h, y = rows.normed[:, labeled], rows.targets[labeled]
        if not len(y):
            return
        if not rows.second:
            self._first(h, y, rows)
            return
        if self.means is None:
            self.means = [ClassMeans.of(s, self.sums["counts"]) for s in self.sums["features"]]
            self.within = [torch.zeros_like(m.variances) for m in self.means]
        self.second_rows += len(y)
        for total, x, m in zip(self.within, h, self.means, strict=True):
            # Only directions in which class means differ matter, so Sigma_W is never formed.
            total += ((x.double() - m.means[y]) @ m.basis.T).square().sum(0)

    def _first(self, h: Tensor, y: Tensor, rows: FeatureRows) -> None:
        classes = rows.stream.classes
        if not self.sums:
            weight = getattr(rows.stream.head, "weight", None)
            self.head = weight.detach().double() if isinstance(weight, Tensor) else None
            zeros = h.new_zeros(len(h), classes, h.shape[-1], dtype=torch.float64)
            self.sums.add(features=zeros, counts=zeros.new_zeros(classes))
        self.sums["features"].index_add_(1, y, h.double())
        self.sums["counts"] += torch.bincount(y, minlength=classes)
        self.rows += len(y)

    def compute(self) -> Result:
        counts = self.sums["counts"]
        seen, classes = int((counts > 0).sum()), len(counts)
        if seen < 2:
            return self.gap(f"it needs 2 classes or more, and the data has {seen}")
        if self.rows <= seen:
            return self.gap(
                f"it needs more samples than classes, and the data has {self.rows} samples in "
                f"{seen} classes",
            )
        if self.means is None:
            return self.gap(NO_SECOND_LOOK)
        columns = np.array([self._depth(i) for i in range(len(self.means))]).T
        names = ("nc1", "nc2_norms", "nc2_angles", "nc3", "separation")
        notes: list[str] = []
        if seen < classes:
            notes.append(f"only {seen} of {classes} classes are in the data")
        where = self.where(np.isnan(columns[0]))
        if where:
            notes.append(f"undefined at depth {where}, where all classes have the same mean")
        return self.over_depths(
            dict(zip(names, columns, strict=True)),
            labels={
                "nc1": "NC1, within- over between-class variance",
                "nc2_norms": "NC2, spread of the means' lengths",
                "nc2_angles": "NC2, distance from equal angles",
                "nc3": "NC3, distance of the head from the means",
                "separation": "separation, log tr(Σ_W Σ_B⁺)",
            },
            meta={"rows": self.rows, "classes": seen},
            note="; ".join(notes) or None,
        )

    def _depth(self, i: int) -> list[float]:
        assert self.means is not None
        m = self.means[i]
        spread = torch.linalg.vector_norm(m.centered, dim=-1)
        scale = torch.linalg.vector_norm(m.means[m.seen], dim=-1).max()
        if float(spread.max()) <= 1e-6 * float(scale):  # float32 features that are all alike
            return [float("nan")] * 5
        k = len(m.centered)
        ratio = float((self.within[i] / self.second_rows / m.variances).sum())
        unit = m.centered / spread.clamp(min=torch.finfo(spread.dtype).tiny)[:, None]
        cosine = (unit @ unit.T)[~torch.eye(k, dtype=torch.bool, device=unit.device)]
        nc3 = float("nan")
        if self.head is not None and self.head.shape[-1] == m.centered.shape[-1]:
            w = self.head[m.seen] if len(self.head) == len(m.seen) else self.head
            if w.shape == m.centered.shape:
                gap_ = w / w.norm() - m.centered / m.centered.norm()
                nc3 = float(gap_.norm())
        return [
            ratio / k,
            float(spread.std(correction=0) / spread.mean()),
            float((cosine + 1 / (k - 1)).abs().mean()),
            nc3,
            float(np.log(ratio)) if ratio > 0 else float("-inf"),
        ]


@register_metric
class Distinguishability(_Structure):
    """Whether inputs with different labels are kept apart.

    different_1, _5, _10: share of the k nearest neighbors with another label. gap: the 1 % quantile
    of distances between differently labeled pairs, over the median of all distances. Only the first
    `samples` rows are compared.
    """

    name = "distinguishability"
    title = "Distinguishability"
    about = "Whether inputs with different labels stay apart."

    samples: ClassVar[int] = 512

    def __init__(self) -> None:
        super().__init__()
        self.first: list[tuple[Tensor, Tensor]] = []

    def update(self, rows: FeatureRows) -> None:
        assert rows.targets is not None
        if self.rows >= self.samples:
            return
        labeled = (rows.targets != IGNORE_INDEX).nonzero().flatten()[: self.samples - self.rows]
        self.first.append((rows.features[:, labeled].clone(), rows.targets[labeled]))
        self.rows += len(labeled)

    def compute(self) -> Result:
        if self.rows < 2:
            return self.gap("it needs 2 labeled samples or more")
        h = torch.cat([features for features, _ in self.first], 1)
        y = torch.cat([targets for _, targets in self.first])
        if bool((y == y[0]).all()):
            return self.gap("all samples have the same label")
        ks = [k for k in (1, 5, 10) if k < self.rows]
        pairs = Pairs.of(y)
        columns = np.array([self._depth(x, y, ks, pairs) for x in h]).T
        names = (*(f"different_{k}" for k in ks), "gap")
        few = f"with {self.rows} samples, k is only {ks}" if len(ks) < 3 else None
        where = self.where(np.isnan(columns[0]))
        same = f"undefined at depth {where}: constant features" if where else None
        return self.over_depths(
            dict(zip(names, columns, strict=True)),
            labels={
                **{f"different_{k}": f"other label among {k} nearest (share)" for k in ks},
                "gap": "1 % distance between labels / median distance",
            },
            meta={"rows": self.rows},
            note="; ".join(filter(None, (few, same))) or None,
        )

    @staticmethod
    def _depth(x: Tensor, y: Tensor, ks: list[int], pairs: Pairs) -> list[float]:
        scale = x.norm(dim=-1).max()
        x = x - x.mean(0)
        if float(x.norm(dim=-1).max()) <= 1e-6 * float(scale):
            return [float("nan")] * (len(ks) + 1)
        # Products of centered rows keep the digits that distances need.
        squares = x.square().sum(1)
        distance = (squares[:, None] + squares - 2 * (x @ x.T)).clamp(min=0)
        distance.fill_diagonal_(torch.inf)
        nearest = distance.topk(max(ks), largest=False).indices
        differs = (y[nearest] != y[:, None]).double()
        squares = distance.flatten()
        close = _root_quantile(array(squares[pairs.different]), 0.01)
        median = _root_quantile(array(squares[pairs.every]), 0.5)
        return [*(float(differs[:, :k].mean()) for k in ks), close / median]


@dataclass(frozen=True)
class Pairs:
    """Flat indices above the diagonal of a square matrix: all, and those of different labels."""

    every: Tensor
    different: Tensor

    @staticmethod
    def of(y: Tensor) -> Pairs:
        upper = torch.ones(len(y), len(y), dtype=torch.bool, device=y.device).triu(1)
        different = upper & (y[:, None] != y)
        return Pairs(upper.flatten().nonzero().flatten(), different.flatten().nonzero().flatten())


def _root_quantile(squares: np.ndarray, share: float) -> float:
    """A quantile of distances from their squares: only the two next to it need a square root."""
    place = (len(squares) - 1) * share
    low, high = int(place), min(int(place) + 1, len(squares) - 1)
    a, b = np.sqrt(np.partition(squares, [low, high])[[low, high]].astype(np.float64))
    return float(a + (b - a) * (place - low))
