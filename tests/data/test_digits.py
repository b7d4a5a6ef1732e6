from __future__ import annotations

import pytest
import torch

from everydepth.data import load_digits
from everydepth.errors import DataError


def test_digits_are_1797_gray_images_in_0_to_1():
    digits = load_digits("all")
    assert digits.pixel_values.shape == (1797, 1, 8, 8)
    assert digits.pixel_values.dtype == torch.float32
    assert (digits.pixel_values.min(), digits.pixel_values.max()) == (0, 1)
    assert digits.classes == tuple("0123456789")


def test_the_three_splits_are_disjoint_and_cover_all_digits():
    parts = [load_digits(name) for name in ("train", "valid", "test")]
    assert sum(map(len, parts)) == 1797
    rows = torch.cat([p.pixel_values.flatten(1) for p in parts])
    # All 1,797 images differ, so a shared one would show as a duplicate.
    assert len(rows.unique(dim=0)) == len(load_digits("all").pixel_values.unique(dim=0)) == 1797


def test_every_split_has_the_same_share_of_each_class():
    whole = load_digits("all").labels.bincount() / 1797
    for name in ("train", "valid", "test"):
        part = load_digits(name).labels
        assert (part.bincount(minlength=10) / len(part) - whole).abs().max() < 0.01


def test_the_seed_fixes_the_split():
    assert torch.equal(load_digits("test").pixel_values, load_digits("test").pixel_values)
    other = load_digits("test", seed=1)
    assert not torch.equal(load_digits("test").pixel_values, other.pixel_values)


def test_validation_is_another_word_for_valid():
    assert torch.equal(load_digits("validation").labels, load_digits("valid").labels)


def test_an_unknown_split_is_answered_with_the_known_ones():
    with pytest.raises(DataError, match=r"split 'tset', but digits has 'train', 'valid', 'test'"):
        load_digits("tset")
