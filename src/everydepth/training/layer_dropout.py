"""Layer dropout: each sample skips some of the blocks, with its own masks and positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from everydepth.stream import ResidualStream, States


def observe_with_layer_dropout(
    stream: ResidualStream, batch: Mapping[str, Any], kept: Bool[Tensor, "depth batch"]
) -> States:
    """The states if sample b runs block l only where `kept[l-1, b]`; elsewhere `h_l = h_{l-1}`.

    A block runs on the rows that keep it, with the rows of its masks and positions. Blocks that
    change the shape are run by all. A block nobody keeps runs on one row whose result is dropped,
    so that all parameters are in the graph (DDP) and get a gradient of zero.
    """
    cursor = stream.start(batch)
    states = [cursor.h]
    for block, keep in zip(stream.blocks, kept.to(cursor.h.device), strict=True):
        if bool(keep.all()) or any(branch.skip is not None for branch in block.branches):
            cursor = stream.step(cursor)
        else:
            rows = keep.nonzero().flatten()
            rows = rows if len(rows) else torch.zeros_like(keep[:1], dtype=torch.long)
            before = cursor.h
            after = stream.step(cursor.select(rows)).h
            ran = keep[rows].view(-1, *[1] * (after.ndim - 1))
            after = torch.where(ran, after, before[rows].to(after.dtype))
            h = before.to(after.dtype).index_copy(0, rows, after)
            cursor = replace(cursor, depth=cursor.depth + 1, h=h)
        states.append(cursor.h)
    return States(stream, tuple(states), cursor.batch, None)
