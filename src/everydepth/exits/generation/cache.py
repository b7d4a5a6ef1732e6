"""A key/value cache for all depths, with slots chosen by the caller."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class SlotCache:
    """Keys and values of all blocks, in preallocated slots.

    It has the interface of transformers' own caches, but the caller sets `at`, the slot of the
    first token in the next call: a block may catch up on tokens that others have already seen, and
    the slot of a rejected token is overwritten or masked.
    """

    def __init__(self, depth: int, capacity: int) -> None:
        self.at = 0
        self._capacity = capacity
        self._keys: list[Tensor | None] = [None] * depth
        self._values: list[Tensor | None] = [None] * depth

    # -- called by the model ----------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the slots from `at` on; returns all slots up to the last one written."""
        end = self.at + key_states.shape[-2]
        return (
            self._write(self._keys, layer_idx, key_states, end),
            self._write(self._values, layer_idx, value_states, end),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.at

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.at

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.at + query_length, 0

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self._rearrange(lambda slots: slots.index_select(0, indices))

    # -- called by the tape -----------------------------------------------------------------------

    def compact(self, order: Tensor) -> None:
        """Move slot `order[row, i]` of each row to slot `i`; later slots are free."""

        def gathered(slots: Tensor) -> Tensor:
            index = order[:, None, :, None].expand(-1, slots.shape[1], -1, slots.shape[3])
            slots[:, :, : order.shape[1]] = slots.gather(2, index)
            return slots

        self._rearrange(gathered)

    def _rearrange(self, change: Any) -> None:
        for store in (self._keys, self._values):
            for i, slots in enumerate(store):
                store[i] = None if slots is None else change(slots)

    def _write(self, store: list[Tensor | None], layer: int, states: Tensor, end: int) -> Tensor:
        slots = store[layer]
        if slots is None or end > slots.shape[2]:
            slots = store[layer] = self._grown(slots, states, end)
        slots[:, :, self.at : end] = states
        return slots[:, :, :end]

    def _grown(self, slots: Tensor | None, states: Tensor, end: int) -> Tensor:
        rows, heads, _, width = states.shape
        capacity = self._capacity if slots is None else 2 * slots.shape[2]
        larger = states.new_empty(rows, heads, max(capacity, end), width)
        if slots is not None:
            larger[:, :, : slots.shape[2]] = slots
        # A masked slot still enters sums as 0 x value, and 0 x NaN is NaN.
        larger[:, :, 0 if slots is None else slots.shape[2] :].zero_()
        return larger
