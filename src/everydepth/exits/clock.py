"""The wall-clock cost of early exit, from blocks and tests timed at two batch sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int
from torch import Tensor

from everydepth.exits.driving import driven_times
from everydepth.exits.policies import NEVER, Confidence
from everydepth.exits.reading import exit_logits
from everydepth.stream import Cursor, ResidualStream
from everydepth.stream.feed import first_rows

SHARE = 0.25  # most time a test may take, relative to the blocks between two tests


@dataclass(frozen=True, kw_only=True, eq=False)
class ExitClock:
    """Seconds for a batch of n rows: `fixed + each * n` for every block and for a test.

    rows: the size of the timed batch. start: seconds of the embedding. test: reading out, judging,
    and taking rows out of the batch, which copies the others.
    """

    rows: int
    start: float
    fixed: np.ndarray
    each: np.ndarray
    test: tuple[float, float]

    @classmethod
    def measured(
        cls, stream: ResidualStream, batch: Mapping[str, Any], repeats: int = 3
    ) -> ExitClock:
        """Run a batch and a quarter of it a few times; the fastest time of each part counts."""
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
            test=(float(fixed[-1]), float(each[-1])),
        )

    def tested(self) -> list[int]:
        """Depths at which a test can pay off, judged by cost alone and not by predictions."""
        last = len(self.fixed)
        block = float(np.mean(self.fixed + self.each * self.rows))
        stride = max(1, math.ceil(self._test(self.rows) / (SHARE * max(block, 1e-12))))
        return list(range(stride, last, stride))

    def speedup(self, leaving: Int[Tensor, " rows"], tested: Sequence[int]) -> float:
        """Expected wall-clock speedup over the full model, if rows exit at these depths."""
        last = len(self.fixed)
        depths = leaving.numpy()
        full = (
            self.start + float((self.fixed + self.each * self.rows).sum()) + self._test(self.rows)
        )
        total = self.start
        for depth in range(1, last + 1):
            alive = float((depths >= depth).mean())
            some = 1 - (1 - alive) ** self.rows  # probability that a batch has rows left
            total += (
                some * float(self.fixed[depth - 1])
                + float(self.each[depth - 1]) * alive * self.rows
            )
            if depth in tested or depth == last:
                total += some * self.test[0] + self.test[1] * alive * self.rows
        return full / total

    def block_speedup(self, leaving: Int[Tensor, " rows"]) -> float:
        """The time of all blocks over that of the blocks these rows ran."""
        return block_speedup(leaving, self.fixed + self.each * self.rows)

    def _test(self, rows: int) -> float:
        return self.test[0] + self.test[1] * rows


def block_speedup(leaving: Int[Tensor, " rows"], seconds: np.ndarray) -> float:
    """`layer_speedup` with blocks weighted by their time: a block in a ResNet's first stage may
    take twice as long as one in its last."""
    ran = np.arange(len(seconds)) < leaving.numpy()[:, None]
    return float(seconds.sum() / (seconds * ran.mean(0)).sum())


def block_seconds(stream: ResidualStream, batch: Mapping[str, Any], repeats: int) -> np.ndarray:
    """Seconds of each block, the fastest of several passes."""
    return driven_times(stream, batch, repeats, lambda _: None, stream.depth).min(0)[1:-1]


def _fastest(stream: ResidualStream, batch: Mapping[str, Any], repeats: int) -> np.ndarray:
    """Seconds of the embedding, each block, and a test halfway."""

    def test(cursor: Cursor) -> None:
        z = exit_logits(stream, stream.exit_state(cursor), cursor.depth, cursor.batch)
        score, _ = Confidence(threshold=NEVER).certainty(z, ())
        cursor.select((score < NEVER).nonzero().flatten())

    return driven_times(stream, batch, repeats, test, max(stream.depth // 2, 1)).min(0)
