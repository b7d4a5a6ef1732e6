"""Cost of every depth from one run, block by block: a cut model costs the sum of its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from everydepth.exits.generation.tape import Tape
from everydepth.exits.measure import LiveBytes, flop_counter, seconds, weight_bytes
from everydepth.stream import Cursor, ResidualStream

NEW_TOKENS = 4  # generated to time decoding; a token takes far less time than a prompt
TRUSTED = 0.1  # relative error beyond which sums are scaled to the times of cut models


@dataclass(frozen=True, eq=False)
class BlockTimes:
    """Seconds of the model cut to each depth, as sums of its parts: (pass, depth 1..L)."""

    total: np.ndarray

    @classmethod
    def of(cls, start: np.ndarray, blocks: np.ndarray, readout: np.ndarray) -> BlockTimes:
        """start, readout: (pass,); blocks: (pass, block)."""
        return cls((start + readout)[:, None] + np.cumsum(blocks, 1))

    def fastest(self, depth: int) -> float:
        return float(self.total[:, depth - 1].min())

    def quartiles(self, depth: int) -> dict[str, float]:
        """The quartiles over passes, in milliseconds."""
        found = np.quantile(1000 * self.total[:, depth - 1], [0.25, 0.5, 0.75])
        return dict(zip(("low", "median", "high"), found.tolist(), strict=True))

    def corrected(self, checked: Mapping[str, Mapping[str, float]]) -> BlockTimes:
        """Scaled to the times of cut models, if running block by block costs noticeably more."""
        ratios = [found["timed_ms"] / found["added_ms"] for found in checked.values()]
        if all(abs(ratio - 1) <= TRUSTED for ratio in ratios):
            return self
        depths = np.arange(1, self.total.shape[1] + 1)
        return BlockTimes(self.total * np.interp(depths, [int(k) for k in checked], ratios))


def times_by_depth(
    stream: ResidualStream,
    batch: Mapping[str, Any],
    repeats: int,
    before: np.ndarray | None = None,
    done: Callable[[float], None] | None = None,
) -> BlockTimes:
    """Time the embedding, each block and the last readout, and add them up.

    before: the parts of a pass that was timed already. done: called with 1 after each pass.
    """
    parts = driven_times(stream, batch, repeats, stream.logits, stream.depth, done)
    if before is not None:
        parts = np.vstack([before, parts])
    return BlockTimes.of(parts[:, 0], parts[:, 1:-1], parts[:, -1])


def driven_times(
    stream: ResidualStream,
    batch: Mapping[str, Any],
    repeats: int,
    read: Callable[[Cursor], Any],
    at: int,
    done: Callable[[float], None] | None = None,
) -> np.ndarray:
    """(pass, part) seconds of the embedding, each block, and `read` at depth `at`.

    done: called with 1 after each pass.
    """
    parts = np.zeros((repeats, stream.depth + 2))
    for turn in range(repeats):
        parts[turn, 0], cursor = seconds(partial(stream.start, batch), stream)
        for depth in range(1, stream.depth + 1):
            parts[turn, depth], cursor = seconds(partial(stream.step, cursor), stream)
            if depth == at:
                parts[turn, -1], _ = seconds(partial(read, cursor), stream)
        if done is not None:
            done(1)
    return parts


def decoding_times(stream: ResidualStream, batch: Mapping[str, Any], repeats: int) -> BlockTimes:
    """Time each block while decoding one more token after the prompts of a batch."""
    ids = batch["input_ids"]
    real = batch.get("attention_mask")
    real = torch.ones_like(ids, dtype=torch.bool) if real is None else real.bool()
    longest = int(real.sum(1).max())
    limit = longest + NEW_TOKENS if stream.positions is None else stream.positions
    ids, real = ids[:, : limit - NEW_TOKENS], real[:, : limit - NEW_TOKENS]
    tape = Tape(stream, ids, real, top=stream.depth, room=ids.shape[1] + NEW_TOKENS)
    h = tape.advance(stream.depth)
    turns = min(max(repeats, 2), NEW_TOKENS)
    parts = np.zeros((turns, stream.depth + 1))
    for turn in range(turns):
        tape.feed(ids[:, -1])
        for depth in range(1, stream.depth + 1):
            parts[turn, depth - 1], h = seconds(partial(tape.advance, depth), stream)
        read = partial(stream.readout, h[:, -1:], stream.depth, {})
        parts[turn, -1], _ = seconds(read, stream)
    return BlockTimes.of(np.zeros(turns), parts[:, :-1], parts[:, -1])


@dataclass(frozen=True, eq=False)
class Counted:
    """Operations and peak memory of one pass: up to each depth 0..L, and of the readout.

    seconds: of the embedding, each block and the readout; counting is a small part of long ones.
    """

    operations: Sequence[int]
    readout_operations: int
    peaks: Sequence[int]
    readout_bytes: int
    seconds: np.ndarray

    def flops(self, depth: int) -> int:
        return self.operations[depth] + self.readout_operations

    def bytes(self, depth: int, model: nn.Module) -> int:
        """Peak memory, including the weights of `model`, which is cut to this depth."""
        return max(self.peaks[depth], self.readout_bytes) + weight_bytes(model)


def counted_by_depth(stream: ResidualStream, batch: Mapping[str, Any]) -> Counted:
    """Count operations and bytes in one pass, block by block."""
    operations: list[int] = []
    peaks: list[int] = []
    took = np.zeros(stream.depth + 2)

    def run() -> int:
        took[0], cursor = seconds(partial(stream.start, batch), stream)
        operations.append(counter.get_total_flops())
        peaks.append(live.peak)
        for depth in range(1, stream.depth + 1):
            took[depth], cursor = seconds(partial(stream.step, cursor), stream)
            operations.append(counter.get_total_flops())
            peaks.append(live.peak)
        live.restart()
        took[-1], _ = seconds(partial(stream.logits, cursor), stream)
        return live.peak

    counter = flop_counter()
    with LiveBytes() as live, counter:
        readout = run()
    more = counter.get_total_flops() - operations[-1]
    return Counted(operations, more, peaks, readout, took)
