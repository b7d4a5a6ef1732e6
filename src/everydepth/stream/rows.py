"""Selecting rows of everything that has a batch dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor


def select_rows(
    value: Any, rows: Tensor, batch_size: int, min_ndim: int = 1, heads: int | None = None
) -> Any:
    """Rows of every tensor inside `value` whose first dimension is the batch; the rest unchanged.

    `min_ndim=2` leaves vectors alone: in the call of a block a vector is a position table, in a
    batch it is one number per row. A first dimension of 1 broadcasts and is kept.
    heads: position biases may have rows and heads in one dimension.
    """
    if isinstance(value, Tensor):
        if value.ndim >= min_ndim and value.shape[0] == batch_size:
            return value.index_select(0, rows.to(value.device))
        if heads is not None and value.ndim >= 3 and value.shape[0] == batch_size * heads:
            apart = value.unflatten(0, (batch_size, heads))
            return apart.index_select(0, rows.to(value.device)).flatten(0, 1)
        return value
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, (tuple, list)):
        picked = [select_rows(item, rows, batch_size, min_ndim, heads) for item in value]
        return picked if isinstance(value, list) else tuple(picked)
    if isinstance(value, Mapping):
        return {
            k: select_rows(item, rows, batch_size, min_ndim, heads) for k, item in value.items()
        }
    return value


def pick_rows(batch: Mapping[str, Any], rows: Tensor | slice, size: int) -> dict[str, Any]:
    """Rows of a batch: of every tensor, and of lists with one item a row (boxes of a detector).

    A slice of rows is a view.
    """

    def picked(value: Any) -> Any:
        if isinstance(value, list) and len(cast(list[Any], value)) == size:
            return value[rows] if isinstance(rows, slice) else [value[i] for i in rows.tolist()]
        if isinstance(rows, Tensor):
            return select_rows(value, rows, size)
        fits = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == size
        return value[rows] if fits else value

    return {key: picked(value) for key, value in batch.items()}


def as_rows(rows: Tensor) -> Tensor:
    """Indices from indices or from a boolean mask."""
    return rows.nonzero().flatten() if rows.dtype == torch.bool else rows
