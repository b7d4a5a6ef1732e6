"""Attention masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from everydepth.stream import Cursor


def attention_bias(
    seen: Bool[Tensor, "rows queries keys"], dtype: torch.dtype
) -> Float[Tensor, "rows 1 queries keys"]:
    """A mask to add to attention scores: 0 where a token is seen, else the lowest number."""
    zero = torch.zeros((), dtype=dtype, device=seen.device)
    # Some models compute the softmax in float32, where the lowest float64 is -inf.
    lowest = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
    return torch.where(seen[:, None], zero, lowest)


def windowed(
    cursor: Cursor, windows: Sequence[int | None], mask_of: Callable[[int | None], Tensor]
) -> Cursor:
    """Give blocks whose window differs from the first one's their own mask, if we set a mask."""
    mask, first = cursor.batch.get("attention_mask"), windows[0]
    if mask is None or mask.ndim != 4 or all(window == first for window in windows):
        return cursor
    masks = {window: mask_of(window) for window in {*windows} - {first}}
    calls = tuple(
        call if window == first else call.exchanged(mask, masks[window])
        for call, window in zip(cursor.calls, windows, strict=False)
    )
    return replace(cursor, calls=calls)
