"""A key/value cache for rows that come and go, each with its own length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from everydepth.exits.generation.parts import Parts


@dataclass(frozen=True)
class Aim:
    """`count` tokens for each of these rows, from slot `starts[i]` on; they see those to `end`."""

    rows: Sequence[int]
    starts: Sequence[int]
    count: int
    end: int
    device: torch.device

    @cached_property
    def level(self) -> bool:
        """Whether all rows begin at the same slot."""
        return min(self.starts) == max(self.starts)

    def beyond(self, window: int | None) -> bool:
        """Whether it sees more slots than this window has."""
        return window is not None and window < self.end

    @cached_property
    def range(self) -> tuple[int, int] | None:
        """The first row and the one after the last, if they are neighbors in this order."""
        first = self.rows[0]
        neighbors = all(row == first + i for i, row in enumerate(self.rows))
        return (first, first + len(self.rows)) if neighbors else None

    @cached_property
    def index(self) -> tuple[Tensor, Tensor]:
        """The rows and slots of all tokens."""
        starts = torch.tensor(self.starts, device=self.device)
        rows = torch.tensor(self.rows, device=self.device)
        return rows[:, None], starts[:, None] + torch.arange(self.count, device=self.device)


class RowCache:
    """One key/value cache for all rows and depths; token `p` of a row is in slot `p`.

    It has the interface of transformers' own caches. Before a block runs, `aim` selects the rows
    and the slot at which each begins, so that rows of different lengths, and blocks that are some
    tokens behind, share one call. The slot of a rejected token is overwritten; the caller masks the
    slots beyond a row's tokens.
    """

    def __init__(self, depth: int, rows: int = 4, slots: int = 64) -> None:
        self._rows, self._slots = rows, slots
        self._keys: list[Tensor | None] = [None] * depth
        self._values: list[Tensor | None] = [None] * depth
        self._aims: list[Aim] = []
        self._parts: Parts | None = None

    def aim(self, aims: list[Aim], parts: Parts | None = None) -> None:
        """Set the target of the next calls.

        parts: told the keys and values of each aim, if there are several.
        """
        if aims != self._aims:  # consecutive blocks often use the same slots
            self._aims = aims
        self._parts = parts

    # -- called by the model ----------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the targeted slots; returns all slots up to the end."""
        both = (self._keys, key_states), (self._values, value_states)
        if self._parts is None:
            (aim,) = self._aims
            keys, values = (self._write(store, layer_idx, new, aim) for store, new in both)
            return keys, values
        keys, values = (
            [
                self._write(store, layer_idx, part, aim)
                for part, aim in zip(self._parts.split(new, 2), self._aims, strict=True)
            ]
            for store, new in both
        )
        self._parts.found = list(zip(keys, values, strict=True))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._aims[0].starts[0]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._aims[0].starts[0]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._aims[0].end, 0

    # -- called by the batch ----------------------------------------------------------------------

    def move(self, source: int, target: int) -> None:
        """Move the row `source` to `target`."""
        for store in (self._keys, self._values):
            for slots in store:
                # A row that has not reached this depth has nothing here.
                if slots is not None and source < slots.shape[0]:
                    slots[target] = slots[source]

    def trim(self, tokens: int) -> None:
        """Free slots if the longest row, with this many tokens, needs less than a quarter."""
        kept = 2 * max(tokens, self._slots)
        for store in (self._keys, self._values):
            for layer, slots in enumerate(store):
                if slots is not None and slots.shape[2] > 2 * kept:
                    store[layer] = slots[:, :, :kept].clone()

    def release(self) -> None:
        """Free all memory; no row is left."""
        depth = len(self._keys)
        self._keys, self._values = [None] * depth, [None] * depth

    @property
    def bytes(self) -> int:
        held = [slots for store in (self._keys, self._values) for slots in store]
        return sum(slots.nbytes for slots in held if slots is not None)

    def _write(self, store: list[Tensor | None], layer: int, states: Tensor, aim: Aim) -> Tensor:
        slots = self._with_room(store, layer, states, aim)
        if aim.range is not None and aim.level:
            (first, last), start = aim.range, aim.starts[0]
            slots[first:last, :, start : aim.end] = states
            return slots[first:last, :, : aim.end]
        rows, places = aim.index
        slots[rows, :, places] = states.transpose(1, 2)
        if aim.range is not None:
            return slots[aim.range[0] : aim.range[1], :, : aim.end]
        return slots[rows[:, 0], :, : aim.end]

    def _with_room(
        self, store: list[Tensor | None], layer: int, states: Tensor, aim: Aim
    ) -> Tensor:
        slots = store[layer]
        need = max(aim.rows) + 1
        if slots is not None and need <= slots.shape[0] and aim.end <= slots.shape[2]:
            return slots
        rows, length = (self._rows, self._slots) if slots is None else slots.shape[::2][:2]
        while rows < need:
            rows *= 2
        while length < aim.end:
            length *= 2
        # Zeros: a masked slot still enters sums as 0 x value, and 0 x NaN is NaN.
        larger = states.new_zeros(rows, states.shape[1], length, states.shape[3])
        if slots is not None:
            larger[: slots.shape[0], :, : slots.shape[2]] = slots
        store[layer] = larger
        return larger
