"""What leaving early takes by the clock: blocks and readouts, timed for batches of two sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int
from torch import Tensor

from everydepth.exits.driving import driven_times
from everydepth.exits.reading import exit_logits
from everydepth.stream import Cursor, ResidualStream
from everydepth.stream.feed import first_rows

SHARE = 0.25  # of the blocks between two tests, what a test may take


@dataclass(frozen=True, kw_only=True, eq=False)
class ExitClock:
    """Seconds of a batch of n rows: `fixed + each n` for every block and for a readout.

    rows: of the batch that was timed.
    """

    rows: int
    start: float
    fixed: np.ndarray
    each: np.ndarray
    readout: tuple[float, float]

    @classmethod
    def measured(
        cls, stream: ResidualStream, batch: Mapping[str, Any], repeats: int = 3
    ) -> ExitClock:
        """Drive a batch, and a quarter of it, a few times; the fastest of each part counts."""
        rows = stream.rows(batch)
        sizes = [rows, max(rows // 4, 1)]
        found = [_fastest(stream, first_rows(stream, batch, size), repeats) for size in sizes]
        whole, part = found[0], found[1]
        if sizes[0] > sizes[1]:
            each = np.clip((whole - part) / (sizes[0] - sizes[1]), 0, whole / rows)
        else:
            each = whole / rows
        fixed = whole - each * rows
        return cls(
            rows=rows,
            start=float(whole[0]),
            fixed=fixed[1:-1],
            each=each[1:-1],
            readout=(float(fixed[-1]), float(each[-1])),
        )

    def tested(self) -> list[int]:
        """Depths at which a test can pay, by cost alone: no look at any prediction."""
        last = len(self.fixed)
        block = float(np.mean(self.fixed + self.each * self.rows))
        stride = max(1, math.ceil(self._read(self.rows) / (SHARE * max(block, 1e-12))))
        return list(range(stride, last, stride))

    def speedup(self, leaving: Int[Tensor, " rows"], tested: Sequence[int]) -> float:
        """Expected time of the full model over that with exits, for rows that leave like these."""
        last = len(self.fixed)
        depths = leaving.numpy()
        full = (
            self.start + float((self.fixed + self.each * self.rows).sum()) + self._read(self.rows)
        )
        total = self.start
        for depth in range(1, last + 1):
            alive = float((depths >= depth).mean())
            some = 1 - (1 - alive) ** self.rows  # the chance that a batch has a row left
            total += (
                some * float(self.fixed[depth - 1])
                + float(self.each[depth - 1]) * alive * self.rows
            )
            if depth in tested or depth == last:
                total += some * self.readout[0] + self.readout[1] * alive * self.rows
        return full / total

    def block_speedup(self, leaving: Int[Tensor, " rows"]) -> float:
        """Time of all blocks over that of the blocks these rows ran: what leaving could save."""
        return block_speedup(leaving, self.fixed + self.each * self.rows)

    def _read(self, rows: int) -> float:
        return self.readout[0] + self.readout[1] * rows


def block_speedup(leaving: Int[Tensor, " rows"], seconds: np.ndarray) -> float:
    """`layer_speedup` with each block counted by its seconds: those of a ResNet's first stage may
    take twice as long as those of its last."""
    ran = np.arange(len(seconds)) < leaving.numpy()[:, None]
    return float(seconds.sum() / (seconds * ran.mean(0)).sum())


def block_seconds(stream: ResidualStream, batch: Mapping[str, Any], repeats: int) -> np.ndarray:
    """Seconds of each block, the fastest of several passes."""
    return driven_times(stream, batch, repeats, lambda _: None, stream.depth).min(0)[1:-1]


def _fastest(stream: ResidualStream, batch: Mapping[str, Any], repeats: int) -> np.ndarray:
    """Seconds of the embedding, each block and a readout on the way."""

    def read(cursor: Cursor) -> Tensor:
        return exit_logits(stream, stream.exit_state(cursor), cursor.depth, cursor.batch)

    return driven_times(stream, batch, repeats, read, max(stream.depth // 2, 1)).min(0)
