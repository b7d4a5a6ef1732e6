"""How alike the depths are for each sample: COS and what follows from it."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from everydepth.results.result import Result, defined, gap
from everydepth.tracing.metric import FeatureMetric, register_metric
from everydepth.tracing.metrics.shared import DEPTH, Kept, array, depths
from everydepth.tracing.observation import FeatureRows

# A centred feature below this share of its mean's length is rounding noise, not a direction.
CONSTANT = 1e-6
QUANTILE_BYTES = 2**26  # per-sample values kept for quantiles; 2,048 rows of 13 x 13 are 1.4 MB


class Centring:
    """The mean of every depth from the first look, unit vectors around it in the second."""

    def __init__(self) -> None:
        self.sum: Tensor | None = None
        self.rows = 0

    def add(self, features: Tensor) -> None:
        found = features.sum(1, dtype=torch.float64)
        self.sum = found if self.sum is None else self.sum + found
        self.rows += features.shape[1]

    def units(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(row, depth, dim) unit vectors, zero where there is no direction; (row, depth) where."""
        assert self.sum is not None
        mean = self.sum / self.rows
        centred = features - mean[:, None].to(features.dtype)
        length = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
        floor = CONSTANT * torch.linalg.vector_norm(mean, dim=-1)[:, None, None]
        real = length > floor.clamp(min=torch.finfo(length.dtype).tiny)
        unit = torch.where(real, centred / length, 0)
        return unit.transpose(0, 1), real[..., 0].T


@register_metric
class Cos(FeatureMetric):
    """Mean cosine of the centred features of every pair of depths, with quantiles over samples."""

    name = "cos"
    title = "Cosine similarity"
    about = "Mean cosine of the features of every two depths, and of each with the last."
    section = "similarity"
    kind = "matrix"
    group = "similarity"
    some_depths = True
    passes = 2
    sides: ClassVar[tuple[Literal["own", "other"], Literal["own", "other"]]] = ("own", "own")

    def __init__(self) -> None:
        self.centring = Centring(), Centring()
        self.total: Tensor | None = None
        self.count: Tensor | None = None
        self.kept = Kept(QUANTILE_BYTES)
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
            self.centring[0].add(a)
            if not same:
                self.centring[1].add(b)
            return
        left, left_real = self.centring[0].units(a)
        right, right_real = (left, left_real) if same else self.centring[1].units(b)
        cosine = left @ right.mT  # (row, depth, depth)
        total = cosine.sum(0, dtype=torch.float64)
        count = left_real.T.double() @ right_real.double()
        self.total = total if self.total is None else self.total + total
        self.count = count if self.count is None else self.count + count
        self.kept.add(cosine)

    def compute(self) -> Result:
        rows = self.centring[0].rows
        if self.widths[0] != self.widths[1]:
            return gap(
                self.name,
                "matrix",
                f"features of width {self.widths[0]} and {self.widths[1]} have no cosine; "
                "CKA compares them (cka_between)",
            )
        if rows < 2:
            return gap(self.name, "matrix", f"{rows} sample: centred, its feature is zero")
        if self.total is None or self.count is None:
            return gap(self.name, "matrix", NO_SECOND_LOOK)
        total, count = array(self.total), array(self.count)
        value = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        names = (self.depths(len(value) - 1), self.depths(value.shape[1] - 1))
        return Result(
            name=self.name,
            kind="matrix",
            series=("value",),
            arrays={
                "depth": names[0],
                "columns": names[1],
                "value": defined(value),
                **self.kept.quantiles(np.isnan(value)),
            },
            labels={
                "depth": DEPTH,
                "columns": DEPTH if self.sides[0] == self.sides[1] else f"{DEPTH}, second model",
                "value": "COS",
            },
            meta={"rows": rows, "quantile_rows": self.kept.rows},
            note=constant_note(value),
        )


NO_SECOND_LOOK = (
    "the mean is known only after the first pass, and there was no second look at the data; raise "
    "memory_budget, or pass data that can be iterated again (a list or a DataLoader)"
)


def constant_note(value: np.ndarray) -> str | None:
    rows = np.flatnonzero(np.isnan(value).all(1))
    columns = np.flatnonzero(np.isnan(value).all(0))
    if not len(rows) and not len(columns):
        return None
    where = ", ".join(map(str, rows if len(rows) else columns))
    return f"the feature is the same for all samples at depth {where}: its cosine is undefined"


@register_metric
class CosBetween(Cos):
    """Depths of the model (rows) against depths of a second model of the same width."""

    name = "cos_between"
    title = "Cosine with the other model"
    about = "Depths of one model by another."
    section = "similarity"
    needs = frozenset({"against"})
    some_depths = False
    sides = ("own", "other")


@register_metric
class EmbeddingCos(Cos):
    """COS of what the readout makes of every depth: projected features, as in CLIP (2.12)."""

    name = "embedding_cos"
    title = "Cosine of embeddings"
    about = "Mean cosine of the embeddings that every two depths give."
    section = "similarity"
    level = "readout"
    tasks = frozenset({"embedding"})


@register_metric
class EmbeddingCosOther(EmbeddingCos):
    """The same within the second model, the other modality."""

    name = "embedding_cos_other"
    title = "Cosine of embeddings, second tower"
    about = "The same for the second tower."
    section = "similarity"
    needs = frozenset({"against"})
    some_depths = False
    sides = ("other", "other")


@register_metric
class EmbeddingCosBetween(EmbeddingCos):
    """Across modalities: depths of one tower against depths of the other."""

    name = "embedding_cos_between"
    title = "Cosine between the towers"
    about = "Mean cosine of the embeddings of a pair, by the depth of each tower."
    section = "similarity"
    needs = frozenset({"against"})
    some_depths = False
    sides = ("own", "other")


@register_metric
class AdjacentCos(FeatureMetric):
    """Cosine of each depth with the one before it, centred; quantiles over samples."""

    name = "adjacent_cos"
    title = "Neighbors"
    about = "Cosine of the features of each depth with the one before."
    section = "similarity"
    group = "similarity"
    some_depths = True
    passes = 2

    def __init__(self) -> None:
        self.centring = Centring()
        self.total: Tensor | None = None
        self.count: Tensor | None = None
        self.kept = Kept(QUANTILE_BYTES)

    def update(self, rows: FeatureRows) -> None:
        if not rows.second:
            self.centring.add(rows.features)
            return
        unit, real = self.centring.units(rows.features)
        cosine = (unit[:, 1:] * unit[:, :-1]).sum(-1)
        total, count = cosine.sum(0, dtype=torch.float64), (real[:, 1:] & real[:, :-1]).sum(0)
        self.total = total if self.total is None else self.total + total
        self.count = count if self.count is None else self.count + count
        self.kept.add(cosine)

    def compute(self) -> Result:
        if self.centring.rows < 2:
            return gap(self.name, "curve", "one sample: centred, its feature is zero")
        if self.total is None or self.count is None:
            return gap(self.name, "curve", NO_SECOND_LOOK)
        total, count = array(self.total), array(self.count)
        value = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        undefined = np.flatnonzero(np.isnan(value)) + 1
        where = ", ".join(map(str, undefined))
        return Result(
            name=self.name,
            kind="curve",
            series=("value",),
            arrays={
                "depth": self.depths(len(value), 1),
                "value": defined(value),
                **self.kept.quantiles(np.isnan(value)),
            },
            labels={"depth": DEPTH, "value": "COS with the depth before"},
            meta={"rows": self.centring.rows, "quantile_rows": self.kept.rows},
            note=f"undefined at depth {where}: a constant feature" if where else None,
        )


@register_metric
class NormRatio(FeatureMetric):
    """`||h_{l-1}|| / ||F_l(h_{l-1})||`, mean over samples: how little block l changes the stream.

    `F_l = h_l - S_l h_{l-1}`, in the coordinates of the last depth.
    """

    name = "norm_ratio"
    title = "Stream against block"
    about = "Length of the stream over the length of what the block adds; high means a small step."
    section = "blocks"
    group = "similarity"

    def __init__(self) -> None:
        self.ratio: Tensor | None = None
        self.norms: Tensor | None = None
        self.still: Tensor | None = None
        self.rows = 0
        self.kept = Kept(QUANTILE_BYTES)

    def update(self, rows: FeatureRows) -> None:
        h = rows.features
        norm = torch.linalg.vector_norm(h, dim=-1)
        change = torch.linalg.vector_norm(h[1:] - h[:-1], dim=-1)
        moved = change > 0
        ratio = torch.where(moved, norm[:-1] / change, 0)
        sums = (
            ratio.sum(1, dtype=torch.float64),
            norm.sum(1, dtype=torch.float64),
            (~moved).sum(1),
        )
        before = (self.ratio, self.norms, self.still)
        self.ratio, self.norms, self.still = (
            new if old is None else old + new for old, new in zip(before, sums, strict=True)
        )
        self.rows += h.shape[1]
        self.kept.add(ratio.T)

    def compute(self) -> Result:
        if self.ratio is None or self.norms is None or self.still is None:
            return gap(self.name, "curve", "no data was seen")
        moved = self.rows - array(self.still)
        value = np.where(moved > 0, array(self.ratio) / np.maximum(moved, 1), np.nan)
        still = np.flatnonzero(moved < self.rows) + 1
        note = f"block {', '.join(map(str, still))} leaves some samples unchanged (not counted)"
        return Result(
            name=self.name,
            kind="curve",
            series=("value",),
            arrays={
                "depth": depths(len(value), 1),
                "value": defined(value),
                "norm": array(self.norms) / self.rows,
                **self.kept.quantiles(np.isnan(value)),
            },
            labels={
                "depth": DEPTH,
                "value": "‖h before‖ / ‖what the block adds‖",
                "norm": "‖h‖",
            },
            meta={"rows": self.rows, "quantile_rows": self.kept.rows},
            note=note if len(still) else None,
        )
