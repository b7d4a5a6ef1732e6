"""A batch with more rows than the zoo gives."""

from __future__ import annotations

import torch
from torch import Tensor

from everydepth.stream.rows import select_rows


def more_rows(batch: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Rows of the batch again and again, each a little different where it can be."""
    size = next(iter(batch.values())).shape[0]
    picked = select_rows(batch, torch.arange(rows) % size, size)
    noise = torch.linspace(0.2, 2, rows, dtype=torch.float64)
    return {
        k: v * noise.view(-1, *[1] * (v.ndim - 1)).to(v) if v.is_floating_point() else v
        for k, v in picked.items()
    }
