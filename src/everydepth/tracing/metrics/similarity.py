"""Similarity of depths per sample: cosines and related measures."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from everydepth.results.result import Result
from everydepth.tracing.metric import FeatureMetric, register_metric
from everydepth.tracing.observation import FeatureRows
from everydepth.tracing.sums import DEPTH, Sums

# A centered feature shorter than this share of the mean is rounding noise, not a direction.
CONSTANT = 1e-6


class Centering:
    """Accumulates the mean of every depth, then returns unit vectors around it.

    on: whether to center; if not, the mean is zero.
    """

    def __init__(self, on: bool = True) -> None:
        self.on = on
        self.sum: Tensor | None = None
        self.rows = 0

    def add(self, features: Tensor) -> None:
        found = features.sum(1, dtype=torch.float64)
        if not self.on:
            found = torch.zeros_like(found)
        self.sum = found if self.sum is None else self.sum + found
        self.rows += features.shape[1]

    def units(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(row, depth, dim) unit vectors, and (row, depth) whether there is a direction."""
        assert self.sum is not None
        mean = self.sum / self.rows
        centered = features - mean[:, None].to(features.dtype)
        length = torch.linalg.vector_norm(centered, dim=-1, keepdim=True)
        floor = CONSTANT * torch.linalg.vector_norm(mean, dim=-1)[:, None, None]
        real = length > floor.clamp(min=torch.finfo(length.dtype).tiny)
        unit = torch.where(real, centered / length, 0)
        return unit.transpose(0, 1), real[..., 0].T


class _Similarity(FeatureMetric):
    section = "similarity"
    group = "similarity"
    some_depths = True
    passes = 2


@register_metric
class Cos(_Similarity):
    """Mean cosine of the centered features of every pair of depths, with quantiles over samples.

    centered: `Cos(centered=False)` keeps what all samples share, such as the gap between two
        modalities (Tracing Representations, Figures 22 and 23).
    """

    name = "cos"
    title = "Cosine similarity"
    about = "Mean cosine similarity of the features of every two depths."
    kind = "matrix"
    sides: ClassVar[tuple[Literal["own", "other"], Literal["own", "other"]]] = ("own", "own")

    def __init__(self, centered: bool = True) -> None:
        super().__init__()
        self.centering = Centering(centered), Centering(centered)
        self.widths = (0, 0)

    def update(self, rows: FeatureRows) -> None:
        both = [rows.features if side == "own" else rows.other for side in self.sides]
        a, b = both
        assert a is not None
        assert b is not None
        self.widths = (a.shape[-1], b.shape[-1])
        if self.widths[0] != self.widths[1]:
            return
        same = self.sides[0] == self.sides[1]
        if not rows.second:
            self.centering[0].add(a)
            if not same:
                self.centering[1].add(b)
            return
        left, left_real = self.centering[0].units(a)
        right, right_real = (left, left_real) if same else self.centering[1].units(b)
        cosine = left @ right.mT  # (row, depth, depth)
        count = left_real.T.double() @ right_real.double()
        self.sums.add(total=cosine.sum(0, dtype=torch.float64), count=count)
        self.kept.add(cosine)

    def compute(self) -> Result:
        rows = self.centering[0].rows
        if self.widths[0] != self.widths[1]:
            return self.gap(
                f"features of widths {self.widths[0]} and {self.widths[1]} have no cosine; use "
                "cka_between",
            )
        centered = self.centering[0].on
        if centered and rows < 2:
            return self.gap("centering needs 2 samples or more")
        if not self.sums:
            return self.gap(NO_SECOND_LOOK)
        value = _means(self.sums)
        columns = self.depths(value.shape[1] - 1)
        return self.over_depths(
            {"value": value},
            beside={"columns": columns, **self.kept.quantiles(np.isnan(value))},
            labels={
                "columns": DEPTH if self.sides[0] == self.sides[1] else f"{DEPTH}, second model",
                "value": "COS" if centered else "COS, not centered",
            },
            meta={"rows": rows, "quantile_rows": self.kept.rows, "centered": centered},
            note=self._constant(value),
        )

    def _constant(self, value: np.ndarray) -> str | None:
        rows, columns = (np.asarray(np.isnan(value).all(axis)) for axis in (1, 0))
        where = self.where(rows) or self.where(columns)
        same = f"undefined at depth {where}, where all samples have the same feature"
        return same if where else None


NO_SECOND_LOOK = (
    "it needs a second look at the data after the mean is known; raise memory_budget, or pass data "
    "that can be iterated again (a list or a DataLoader)"
)


def _means(sums: Sums) -> np.ndarray:
    """`total` over `count`; NaN if the count is 0."""
    total, count = sums.array("total"), sums.array("count")
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


@register_metric
class CosBetween(Cos):
    """Depths of the model (rows) against depths of a second model of the same width."""

    name = "cos_between"
    title = "Cosine with the other model"
    about = "Mean cosine similarity of each depth with each depth of the other model."
    needs = frozenset({"against"})
    some_depths = False
    sides = ("own", "other")


@register_metric
class EmbeddingCos(Cos):
    """Cosines of the embeddings read out at every depth, as in CLIP (2.12)."""

    name = "embedding_cos"
    title = "Cosine of embeddings"
    about = "Mean cosine similarity of the embeddings at every two depths."
    level = "readout"
    tasks = frozenset({"embedding"})


@register_metric
class EmbeddingCosOther(EmbeddingCos):
    """`EmbeddingCos` of the second model, the other modality."""

    name = "embedding_cos_other"
    title = "Cosine of embeddings, second tower"
    about = "Mean cosine similarity of the second tower's embeddings at every two depths."
    needs = frozenset({"against"})
    some_depths = False
    sides = ("other", "other")


@register_metric
class EmbeddingCosBetween(EmbeddingCos):
    """Across modalities: depths of one tower against depths of the other."""

    name = "embedding_cos_between"
    title = "Cosine between the towers"
    about = "Mean cosine similarity of the two embeddings of a pair, by the depth of each tower."
    needs = frozenset({"against"})
    some_depths = False
    sides = ("own", "other")


@register_metric
class AdjacentCos(_Similarity):
    """Cosine of each depth with the one before it, centered; quantiles over samples."""

    name = "adjacent_cos"
    title = "Neighbors"
    about = "Mean cosine similarity of each depth's features with those of the previous depth."

    def __init__(self) -> None:
        super().__init__()
        self.centering = Centering()

    def update(self, rows: FeatureRows) -> None:
        if not rows.second:
            self.centering.add(rows.features)
            return
        unit, real = self.centering.units(rows.features)
        cosine = (unit[:, 1:] * unit[:, :-1]).sum(-1)
        count = (real[:, 1:] & real[:, :-1]).sum(0)
        self.sums.add(total=cosine.sum(0, dtype=torch.float64), count=count)
        self.kept.add(cosine)

    def compute(self) -> Result:
        if self.centering.rows < 2:
            return self.gap("centering needs 2 samples or more")
        if not self.sums:
            return self.gap(NO_SECOND_LOOK)
        value = _means(self.sums)
        where = self.where(np.isnan(value), first=1)
        return self.over_depths(
            {"value": value},
            first=1,
            beside=self.kept.quantiles(np.isnan(value)),
            labels={"value": "COS with the previous depth"},
            meta={"rows": self.centering.rows, "quantile_rows": self.kept.rows},
            note=f"undefined at depth {where}: constant features" if where else None,
        )


@register_metric
class Straightness(FeatureMetric):
    """`||h_L - h_1||` over the length of the path from h_1 to h_L; 1 is a straight line.

    Tracing Representations assumes that features travel along one (Assumption 1, Eq. 6).
    """

    name = "straightness"
    title = "Straightness of the path"
    about = "Distance between the first and last depth, over the length of the path between them."
    section = "blocks"
    kind = "scalar"
    group = "similarity"
    default = False

    def update(self, rows: FeatureRows) -> None:
        h = rows.features[1:].double()  # at depth 0, all samples may have the same feature
        if len(h) < 2:
            return
        path = torch.linalg.vector_norm(h.diff(dim=0), dim=-1).sum(0)
        straight = torch.linalg.vector_norm(h[-1] - h[0], dim=-1) / path.clamp(min=1e-12)
        self.sums.add(total=straight.sum())
        self.rows += len(straight)
        self.kept.add(straight[:, None])

    def compute(self) -> Result:
        if not self.rows:
            return self.gap("a path needs two blocks or more")
        quantiles = self.kept.quantiles()
        return Result(
            name=self.name,
            kind=self.kind,
            series=("value",),
            arrays={
                "value": np.asarray(self.sums.array("total") / self.rows),
                **{name: np.asarray(value.item()) for name, value in quantiles.items()},
            },
            labels={"value": "distance from depth 1 to L / length of the path"},
            meta={"rows": self.rows, "quantile_rows": self.kept.rows},
        )


@register_metric
class NormRatio(FeatureMetric):
    """`||h_{l-1}|| / ||F_l(h_{l-1})||`, mean over samples: how little block l changes the stream.

    `F_l = h_l - S_l h_{l-1}`, in the coordinates of the last depth.
    """

    name = "norm_ratio"
    title = "Stream over block"
    about = "Norm of the stream over the norm of the block's contribution; high is a small step."
    section = "blocks"
    group = "similarity"

    def update(self, rows: FeatureRows) -> None:
        h = rows.features
        norm = torch.linalg.vector_norm(h, dim=-1)
        change = torch.linalg.vector_norm(h[1:] - h[:-1], dim=-1)
        moved = change > 0
        ratio = torch.where(moved, norm[:-1] / change, 0)
        self.sums.add(
            total=ratio.sum(1, dtype=torch.float64),
            norms=norm.sum(1, dtype=torch.float64),
            count=moved.sum(1),
        )
        self.rows += h.shape[1]
        self.kept.add(ratio.T)

    def compute(self) -> Result:
        value = _means(self.sums)
        still = self.where(self.sums.array("count") < self.rows, first=1)
        return self.over_depths(
            {"value": value},
            first=1,
            beside={
                "norm": self.sums.array("norms") / self.rows,
                **self.kept.quantiles(np.isnan(value)),
            },
            labels={"value": "‖h before‖ / ‖what the block adds‖", "norm": "‖h‖"},
            meta={"rows": self.rows, "quantile_rows": self.kept.rows},
            note=f"block {still} leaves some samples unchanged; not counted" if still else None,
        )
