from __future__ import annotations

from math import inf, nan

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from everydepth.data import flip_labels
from everydepth.errors import DataError, SettingError

LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=60).map(torch.tensor)


@given(labels=LABELS, fraction=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_exactly_the_recorded_rows_change_and_all_to_another_valid_label(
    labels: torch.Tensor, fraction: float, seed: int
):
    amount = round(fraction * len(labels))
    assume(amount > 0 or fraction == 0)  # a fraction that flips no row is refused
    noisy = flip_labels(labels, fraction, classes=5, seed=seed)
    changed = (noisy.labels != labels).nonzero().flatten()
    assert torch.equal(changed, noisy.flipped)
    assert len(noisy.flipped) == amount
    assert torch.equal(noisy.original, labels)
    assert ((noisy.labels >= 0) & (noisy.labels < 5)).all()


@given(labels=LABELS, seed=st.integers(0, 1000), data=st.data())
def test_noise_of_one_class_leaves_the_other_classes_alone(
    labels: torch.Tensor, seed: int, data: st.DataObject
):
    of_class = data.draw(st.sampled_from(labels.unique().tolist()))
    noisy = (
        flip_labels(labels, 0.5, of_class=of_class, classes=5, seed=seed)
        if ((labels == of_class).sum() > 1)
        else flip_labels(labels, 1.0, of_class=of_class, classes=5, seed=seed)
    )
    assert (labels[noisy.flipped] == of_class).all()
    assert (noisy.labels[noisy.flipped] != of_class).all()


def test_the_new_labels_are_uniform_over_the_other_classes():
    noisy = flip_labels(torch.full((9000,), 1), 1.0, classes=4, seed=0)
    counts = noisy.labels.bincount(minlength=4)
    assert counts[1] == 0
    assert (counts[[0, 2, 3]] - 3000).abs().max() < 200  # about 4 standard deviations


def test_the_given_labels_are_not_changed_and_the_seed_fixes_the_noise():
    labels = torch.arange(100) % 10
    first, second = flip_labels(labels, 0.2, seed=5), flip_labels(labels, 0.2, seed=5)
    assert torch.equal(labels, torch.arange(100) % 10)
    assert torch.equal(first.labels, second.labels)
    assert not torch.equal(first.flipped, flip_labels(labels, 0.2, seed=6).flipped)


def test_five_percent_of_one_class_of_a_hundred_is_five():
    labels = torch.arange(1000) % 10
    assert len(flip_labels(labels, 0.05, of_class=3).flipped) == 5


def test_no_noise_flips_nothing():
    assert len(flip_labels([0, 1], 0.0).flipped) == 0


@pytest.mark.parametrize("fraction", [-0.1, 1.5, 5.0, inf])
def test_a_fraction_outside_0_to_1_is_refused(fraction: float):
    with pytest.raises(DataError, match=rf"fraction {fraction}, but it must be from 0 to 1; for 5"):
        flip_labels([0, 1, 1], fraction)


def test_a_fraction_that_is_no_number_is_refused():
    with pytest.raises(SettingError, match=r"flip_labels\(fraction=nan\); use a number"):
        flip_labels([0, 1, 1], nan)


def test_a_class_that_is_absent_is_refused():
    with pytest.raises(DataError, match=r"of_class 7, but the labels hold 0, 1, 3; use one of"):
        flip_labels([0, 1, 3, 3], 0.5, of_class=7)


def test_a_class_with_too_few_samples_is_refused():
    message = r"fraction 0.05 of 3 sample\(s\) of class 1 flips none; use a fraction above 0.167"
    with pytest.raises(DataError, match=message):
        flip_labels([0, 1, 1, 1], 0.05, of_class=1)


def test_a_single_class_is_refused():
    with pytest.raises(DataError, match=r"1 class\(es\), but a different label needs at least 2"):
        flip_labels([0, 0], 0.5)


def test_a_label_outside_the_classes_is_refused():
    with pytest.raises(DataError, match=r"label -100, but with 3 classes labels run from 0 to 2"):
        flip_labels([0, 2, -100], 0.5)
    with pytest.raises(DataError, match=r"label 4, but with 3 classes labels run from 0 to 2"):
        flip_labels([0, 4], 0.5, classes=3)


def test_labels_that_are_empty_or_not_whole_numbers_are_refused():
    with pytest.raises(DataError, match=r"labels is empty, but at least one is needed"):
        flip_labels(torch.zeros(0, dtype=torch.long), 0.5)
    with pytest.raises(DataError, match=r"labels of torch.int64 with shape \(2, 2\), but they"):
        flip_labels(torch.tensor([[0, 1], [1, 0]]), 0.5)
    with pytest.raises(DataError, match=r"labels of torch.float32 with shape \(2,\), but they"):
        flip_labels(torch.tensor([0.0, 1.0]), 0.5)
