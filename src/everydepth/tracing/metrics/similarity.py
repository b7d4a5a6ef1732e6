"""How alike the depths are: COS (SPEC 2.1)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from everydepth.tracing.metric import FeatureMetric, register_metric
from everydepth.tracing.metrics.shared import DEPTH, array, depths, quantiles
from everydepth.tracing.observation import FeatureRows
from everydepth.tracing.result import Result, defined, gap

HELD_ROWS = 65_536  # rows of which per-sample cosines are kept for quantiles
# A centred feature below this share of its mean's length is rounding noise, not a direction.
CONSTANT = 1e-6


@register_metric
class Cos(FeatureMetric):
    """Mean cosine of the centred features of every pair of depths, with quantiles."""

    name = "cos"
    kind = "matrix"
    group = "similarity"
    passes = 2

    def __init__(self) -> None:
        self.sum: Tensor | None = None
        self.rows = 0
        self.total: Tensor | None = None
        self.count: Tensor | None = None
        self.kept: list[Tensor] = []
        self.kept_rows = 0

    def update(self, rows: FeatureRows) -> None:
        if not rows.second:
            found = rows.features.sum(1, dtype=torch.float64)
            self.sum = found if self.sum is None else self.sum + found
            self.rows += rows.features.shape[1]
            return
        assert self.sum is not None
        mean = self.sum / self.rows
        centred = rows.features - mean[:, None].to(rows.features.dtype)
        length = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
        floor = CONSTANT * torch.linalg.vector_norm(mean, dim=-1)[:, None, None]
        real = length > floor.clamp(min=torch.finfo(length.dtype).tiny)
        unit = torch.where(real, centred / length, 0).transpose(0, 1)
        cosine = unit @ unit.mT  # (row, depth, depth)
        both = real[..., 0].T.double()
        total, count = cosine.sum(0, dtype=torch.float64), both.T @ both
        self.total = total if self.total is None else self.total + total
        self.count = count if self.count is None else self.count + count
        if self.kept_rows < HELD_ROWS:
            self.kept.append(cosine.float())
            self.kept_rows += len(cosine)

    def compute(self) -> Result:
        if self.total is None or self.count is None:
            return gap(self.name, "matrix", "there was no second look at the data")
        if self.rows < 2:
            return gap(self.name, "matrix", f"{self.rows} sample: a centred feature is zero")
        with np.errstate(invalid="ignore"):
            value = array(self.total) / np.where(array(self.count) > 0, array(self.count), np.nan)
        where = depths(len(value) - 1)
        constant = where[np.isnan(np.diagonal(value))]
        note = (
            f"the feature is the same for all samples at depth {', '.join(map(str, constant))}: "
            "its cosine is undefined"
            if len(constant)
            else None
        )
        kept = array(torch.cat(self.kept))
        return Result(
            name=self.name,
            kind="matrix",
            series=("value",),
            arrays={
                "depth": where,
                "columns": where,
                "value": defined(value),
                **quantiles(kept, axis=0),
            },
            labels={"depth": DEPTH, "columns": DEPTH, "value": "COS"},
            meta={"rows": self.rows, "quantile_rows": len(kept)},
            note=note,
        )
