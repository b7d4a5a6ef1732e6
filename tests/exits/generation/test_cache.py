"""The cache of slots: written where it is told, grown, cut to rows and compacted."""

from __future__ import annotations

import torch

from everydepth.exits.generation.cache import SlotCache


def states(*tokens: float) -> torch.Tensor:
    """Two rows, one head, width 1: row 0 holds the numbers, row 1 the same plus a hundred."""
    row = torch.tensor(tokens)[:, None]
    return torch.stack([row, row + 100])[:, None]


def filled() -> SlotCache:
    cache = SlotCache(depth=2, capacity=4)
    cache.update(states(0, 1, 2), states(0, 1, 2), 1)
    return cache


def test_a_call_gives_every_slot_up_to_the_last_one_written() -> None:
    cache = filled()
    cache.at = 3
    keys, values = cache.update(states(3), -states(3), 1)
    assert keys[:, 0, :, 0].tolist() == [[0, 1, 2, 3], [100, 101, 102, 103]]
    assert values[0, 0, 3, 0] == -3
    assert cache.get_mask_sizes(2) == (5, 0)


def test_a_block_may_be_behind_the_others() -> None:
    cache = filled()
    keys, _ = cache.update(states(7), states(7), 0)
    assert keys.shape[2] == 1


def test_a_slot_is_written_again_after_a_rejection() -> None:
    cache = filled()
    cache.at = 1
    keys, _ = cache.update(states(9), states(9), 1)
    assert keys[0, 0, :, 0].tolist() == [0, 9]


def test_growing_keeps_what_is_there_and_adds_zeros() -> None:
    cache = filled()
    cache.at = 6
    keys, _ = cache.update(states(6), states(6), 1)
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 0, 0, 0, 6]


def test_compacting_moves_each_rows_own_slots() -> None:
    cache = filled()
    cache.compact(torch.tensor([[0, 2], [1, 2]]))
    cache.at = 2
    keys, _ = cache.update(states(5), states(5), 1)
    assert keys[:, 0, :, 0].tolist() == [[0, 2, 5], [101, 102, 105]]


def test_rows_can_be_selected() -> None:
    cache = filled()
    cache.batch_select_indices(torch.tensor([1]))
    cache.at = 3
    keys, _ = cache.update(states(3)[1:], states(3)[1:], 1)
    assert keys[:, 0, :, 0].tolist() == [[100, 101, 102, 103]]
