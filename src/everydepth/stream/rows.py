"""Selecting rows of anything with a batch dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from everydepth.config import brief
from everydepth.errors import BatchError

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def as_tensor(value: Any) -> Tensor:
    """A dense tensor, from any order of bytes, and with unsigned integers as signed ones."""
    if isinstance(value, np.ndarray) and not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    found = torch.as_tensor(value)
    if found.is_nested or found.is_sparse:
        raise BatchError(
            "a tensor is nested or sparse; pass a dense one, with rows padded to one length"
        )
    return found.long() if found.dtype in _UNSIGNED else found


def select_rows(
    value: Any, rows: Tensor, batch_size: int, min_ndim: int = 1, heads: int | None = None
) -> Any:
    """Select rows of every tensor in `value` whose first dimension is the batch; keep the rest.

    `min_ndim=2` keeps vectors: among a block's arguments a vector is a position table, in a batch
    it is one number per row. A first dimension of 1 broadcasts and is kept.
    heads: position biases may combine rows and heads in one dimension.
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


UNKNOWN = object()
"""In place of an axis, if it is not known."""


def row_axes(value: Any, doubled: Any) -> Any:
    """The batch dimension of each tensor in `value`; None for those without one.

    doubled: the same value for a batch with every row twice. A position table and a mask may have
        the same shape, but only the mask grows with the batch.
    """
    if isinstance(value, Tensor) and isinstance(doubled, Tensor) and value.ndim == doubled.ndim:
        sizes = list(zip(value.shape, doubled.shape, strict=True))
        grown = [axis for axis, (a, b) in enumerate(sizes) if a and b == 2 * a]
        return grown[0] if grown else None
    if type(value) is not type(doubled):
        return UNKNOWN
    if isinstance(value, (tuple, list)) and len(value) == len(doubled):
        return [row_axes(a, b) for a, b in zip(value, doubled, strict=True)]
    if (
        isinstance(value, Mapping)
        and isinstance(doubled, Mapping)
        and value.keys() == doubled.keys()
    ):
        return {key: row_axes(item, doubled[key]) for key, item in value.items()}
    return UNKNOWN


def select_along(value: Any, axes: Any, rows: Tensor, size: int, heads: int | None) -> Any:
    """Select rows of every tensor in `value` along its axis, or by shape if that is unknown."""
    if isinstance(value, Tensor) and axes is None:
        return value
    if isinstance(value, Tensor) and isinstance(axes, int):
        if axes < value.ndim and value.shape[axes] and value.shape[axes] % size == 0:
            # The dimension may combine rows with something else, such as heads.
            apart = value.unflatten(axes, (size, -1))
            return apart.index_select(axes, rows.to(value.device)).flatten(axes, axes + 1)
        return value  # one row for all
    if isinstance(value, (tuple, list)) and isinstance(axes, list) and len(axes) == len(value):
        picked = [select_along(v, a, rows, size, heads) for v, a in zip(value, axes, strict=True)]
        return picked if isinstance(value, list) else tuple(picked)
    if isinstance(value, Mapping) and isinstance(axes, Mapping) and axes.keys() == value.keys():
        return {k: select_along(v, axes[k], rows, size, heads) for k, v in value.items()}
    return select_rows(value, rows, size, 2, heads)


def pick_rows(batch: Mapping[str, Any], rows: Tensor | slice, size: int) -> dict[str, Any]:
    """Select rows of a batch: of tensors, and of lists with one item per row (a detector's boxes).

    With a slice, tensors are views.
    """

    def picked(value: Any) -> Any:
        if isinstance(value, list) and len(cast(list[Any], value)) == size:
            return value[rows] if isinstance(rows, slice) else [value[i] for i in rows.tolist()]
        if isinstance(rows, Tensor):
            return select_rows(value, rows, size)
        fits = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == size
        return value[rows] if fits else value

    return {key: picked(value) for key, value in batch.items()}


def whole_numbers(values: Any, what: str) -> Tensor:
    """A vector of integers or booleans; raise for anything else. what: its name, for the error."""
    try:
        found = as_tensor(values)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise BatchError(
            f"{what} is {brief(values)}, not numbers; pass a vector of integers"
        ) from error
    if found.ndim != 1 or found.is_floating_point() or found.is_complex():
        if found.numel() == 0:
            return found.flatten().long()
        raise BatchError(
            f"{what} is {str(found.dtype)[6:]} of shape {tuple(found.shape)}; pass a vector of "
            "integers"
        )
    return found if found.dtype == torch.bool else found.long()


def numbers_in(rows: Tensor, count: int) -> Tensor:
    """Row numbers from row numbers or a boolean mask; raise if the data has no such rows."""
    if rows.dtype == torch.bool:
        if len(rows) != count:
            raise BatchError(
                f"a mask of {len(rows)} rows, but the data has {count}; give one boolean per row"
            )
    elif len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < count):
        wrong = int(rows.min()) if int(rows.min()) < 0 else int(rows.max())
        raise BatchError(
            f"row {wrong} is requested, but the data has {count} rows; use 0 to {count - 1}"
        )
    return as_rows(rows)


def as_rows(rows: Tensor) -> Tensor:
    """Indices from indices or from a boolean mask."""
    if rows.ndim != 1 or rows.is_floating_point() or rows.is_complex():
        raise BatchError(
            f"rows are {str(rows.dtype)[6:]} of shape {tuple(rows.shape)}; pass a vector of "
            "integers, or of one boolean per row"
        )
    return rows.nonzero().flatten() if rows.dtype == torch.bool else rows
