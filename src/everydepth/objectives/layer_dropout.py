"""Layer dropout: each sample skips some of the blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor, distributed

from everydepth.config import setting
from everydepth.errors import SettingError
from everydepth.objectives.moment import Moment
from everydepth.objectives.technique import Technique
from everydepth.stream import ResidualStream, States


@dataclass(frozen=True, kw_only=True)
class LayerDropout(Technique, name="layer_dropout"):
    """Skip block l with probability `most * (2^((l-1)/(L-1)) - 1)` per sample (LayerSkip, Eq. 3).

    Over T training steps, the probability may rise with `2^(step/(T-1)) - 1`, or fall linearly to
    0, so that the model ends training as it is used, with all blocks.
    """

    most: float = setting(above=0, below=1, help="Probability of skipping the last block.")
    rises: bool = setting(False, help="Increase the probabilities over training.")
    decays: bool = setting(False, help="Decrease the probabilities to 0 over training.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rises and self.decays:
            raise SettingError("layer_dropout: rises=True and decays=True; choose one")

    @property
    def needs_total(self) -> bool:
        return self.rises or self.decays

    def kept(self, moment: Moment, rows: int, *, stream: int = 0) -> Bool[Tensor, "depth batch"]:
        """True where a sample runs a block. `stream`: a number that selects the random pattern."""
        chance = np.exp2(np.arange(moment.depth) / max(moment.depth - 1, 1)) - 1
        if self.needs_total:
            done = min(moment.step / max(moment.steps - 1, 1), 1.0)
            chance = chance * (2**done - 1 if self.rises else 1 - done)
        draws = moment.random(1, stream).random((moment.depth, rows))
        return torch.from_numpy(draws >= (self.most * chance)[:, None])

    def observe(self, stream: ResidualStream, batch: Mapping[str, Any], moment: Moment) -> States:
        together = distributed.is_available() and distributed.is_initialized()
        rank = distributed.get_rank() if together else 0
        return observe_kept(stream, batch, self.kept(moment, stream.rows(batch), stream=rank))


def observe_kept(
    stream: ResidualStream, batch: Mapping[str, Any], kept: Bool[Tensor, "depth batch"]
) -> States:
    """The states if sample b runs block l only where `kept[l-1, b]`; elsewhere `h_l = h_{l-1}`.

    A block runs on the rows that keep it, with their masks and positions. All samples run blocks
    that change the shape. A block that no sample keeps runs on one row whose result is discarded,
    so that all parameters are in the graph (for DDP) and get a gradient of zero.
    kept: on the CPU, so that reading it does not wait for the device.
    """
    cursor = stream.start(batch)
    states = [cursor.h]
    for block, keep in zip(stream.blocks, kept, strict=True):
        if bool(keep.all()) or any(branch.skip is not None for branch in block.branches):
            cursor = stream.step(cursor)
        else:
            rows = keep.nonzero().flatten()
            rows = rows if len(rows) else torch.zeros_like(keep[:1], dtype=torch.long)
            axis, device = cursor.axis, cursor.h.device
            places, part = cursor.places(rows).to(device), cursor.select(rows.to(device))
            after = stream.step(part).h
            ran = keep[rows].repeat_interleave(len(places) // len(rows)).to(device)
            ran = ran.view(-1, *[1] * (after.ndim - 1 - axis))
            after = torch.where(ran, after, part.h.to(after.dtype))
            h = cursor.h.to(after.dtype).index_copy(axis, places, after)
            cursor = replace(cursor, depth=cursor.depth + 1, h=h)
        states.append(cursor.h)
    stream.conclude(cursor)
    return States(stream, tuple(states), cursor.batch, None, cursor.calls)
