"""A key/value cache for rows that come and go, each with its own length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
        # Consecutive blocks often use the same slots.
        self._target: tuple[list[int], list[int], int] | None = None
        self._index: tuple[Tensor, Tensor] | None = None

    def aim(self, rows: list[int], starts: list[int], count: int, end: int) -> None:
        """Set the target of the next calls: `count` tokens per row, from slot `starts[i]` on.

        They receive the slots up to `end`.
        """
        if (rows, starts, count) != self._target:
            self._target, self._index = (rows, starts, count), None
        self._aimed, self._first, self._end = rows, starts[0], end
        self._level = min(starts) == max(starts)
        neighbors = rows[-1] - rows[0] + 1 == len(rows) and rows == sorted(rows)
        self._range = (rows[0], rows[-1] + 1) if neighbors else None
        self._starts, self._count = starts, count

    # -- called by the model ----------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the targeted slots; returns all slots up to `end`."""
        return (
            self._write(self._keys, layer_idx, key_states),
            self._write(self._values, layer_idx, value_states),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._first

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._first

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._end, 0

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

    def _write(self, store: list[Tensor | None], layer: int, states: Tensor) -> Tensor:
        slots = self._with_room(store, layer, states)
        end = self._end
        if self._range is not None and self._level:
            first, last = self._range
            slots[first:last, :, self._first : self._first + self._count] = states
            return slots[first:last, :, :end]
        rows, places = self._indices(states.device)
        slots[rows[:, None], :, places] = states.transpose(1, 2)
        if self._range is not None:
            return slots[self._range[0] : self._range[1], :, :end]
        return slots[rows, :, :end]

    def _indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._index is None:
            rows = torch.tensor(self._aimed, device=device)
            starts = torch.tensor(self._starts, device=device)
            self._index = rows, starts[:, None] + torch.arange(self._count, device=device)
        return self._index

    def _with_room(self, store: list[Tensor | None], layer: int, states: Tensor) -> Tensor:
        slots = store[layer]
        need = max(self._aimed) + 1
        if slots is not None and need <= slots.shape[0] and self._end <= slots.shape[2]:
            return slots
        rows, length = (self._rows, self._slots) if slots is None else slots.shape[::2][:2]
        while rows < need:
            rows *= 2
        while length < self._end:
            length *= 2
        # Zeros: a masked slot still enters sums as 0 x value, and 0 x NaN is NaN.
        larger = states.new_zeros(rows, states.shape[1], length, states.shape[3])
        if slots is not None:
            larger[: slots.shape[0], :, : slots.shape[2]] = slots
        store[layer] = larger
        return larger
