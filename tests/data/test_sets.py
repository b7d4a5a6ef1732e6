from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from everydepth.data import Corpus, Images, Points, Table, Texts
from everydepth.errors import DataError


def images(rows: int = 12, channels: int = 3) -> Images:
    pixels = torch.arange(rows * channels * 4).remainder(256).to(torch.uint8)
    labels = torch.arange(rows) % 3
    return Images(pixels.view(rows, channels, 2, 2), labels, ("a", "b", "c"))


def numbered(rows: int) -> Points:
    return Points(torch.arange(rows).float()[:, None], torch.zeros(rows, 1))


@pytest.mark.parametrize(("count", "left"), [(3, 3), (12, 12), (99, 12), (None, 12), (0, 0)])
def test_first_returns_the_requested_rows_or_all(count: int | None, left: int):
    assert numbered(12).first(count).inputs.flatten().tolist() == list(range(left))


@given(
    rows=st.integers(20, 200),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
)
def test_parts_of_a_split_are_disjoint_and_cover_everything(rows: int, cuts: list[int], seed: int):
    fractions = [cut / sum(cuts) for cut in cuts]
    assume(min(fractions) * rows >= 2)
    parts = numbered(rows).split(fractions, seed)
    together = torch.cat([part.inputs.flatten() for part in parts])
    assert together.sort().values.tolist() == list(range(rows))
    for part, fraction in zip(parts, fractions, strict=True):
        assert abs(len(part) - fraction * rows) <= 1


def test_a_split_depends_on_the_seed_only():
    first, second = numbered(50).split((0.5, 0.5), 1), numbered(50).split((0.5, 0.5), 1)
    assert torch.equal(first[0].inputs, second[0].inputs)
    assert not torch.equal(first[0].inputs, numbered(50).split((0.5, 0.5), 2)[0].inputs)


def test_a_stratified_split_keeps_the_share_of_every_class():
    data = replace(images(120), labels=torch.tensor([0] * 90 + [1] * 20 + [2] * 10))
    parts = data.split((0.8, 0.1, 0.1), stratified=True)
    assert [part.labels.bincount().tolist() for part in parts] == [
        [72, 16, 8],
        [9, 2, 1],
        [9, 2, 1],
    ]


@pytest.mark.parametrize("fractions", [(), (0.5, 0.4), (1.2, -0.2), (1.0, 0.0)])
def test_fractions_that_do_not_make_a_whole_are_refused(fractions: tuple[float, ...]):
    with pytest.raises(DataError, match=r"must be positive and add up to 1; use for example"):
        numbered(10).split(fractions)
    with pytest.raises(DataError, match=r"must be positive and add up to 1; use for example"):
        Corpus("abc").split(fractions)


def test_a_part_without_rows_is_refused():
    with pytest.raises(DataError, match=r"3 rows split by \(0.9, 0.1\) leave a part without rows"):
        numbered(3).split((0.9, 0.1))


def test_points_cannot_be_stratified():
    with pytest.raises(DataError, match=r"this Points has no class labels; use stratified=False"):
        numbered(10).split((0.5, 0.5), stratified=True)


def test_a_subset_takes_rows_in_the_given_order_or_by_a_mask():
    data = images()
    assert data.subset([5, 0]).labels.tolist() == [2, 0]
    assert data.subset(data.labels == 1).labels.tolist() == [1, 1, 1, 1]
    assert data.subset([5, 0]).classes == data.classes
    texts = Texts(("x", "y", "z"), pairs=("1", "2", "3"))
    assert texts.subset([2, 1]).texts == ("z", "y")
    assert texts.subset([2, 1]).pairs == ("3", "2")


def test_an_index_outside_the_rows_is_refused():
    with pytest.raises(DataError, match=r"index 12, but this dataset has 12 rows; use 0 to 11"):
        images().subset([3, 12])
    with pytest.raises(DataError, match=r"indices are float32; use whole numbers"):
        images().subset(torch.tensor([1.7]))
    with pytest.raises(DataError, match=r"a mask of shape \(2,\), but this dataset has 12 rows"):
        images().subset(torch.tensor([True, False]))


def test_columns_of_different_length_are_refused():
    with pytest.raises(
        DataError, match=r"texts has 2 rows, pairs has 1 rows, but all need the same number of rows"
    ):
        Texts(("a", "b"), pairs=("c",))


def test_bytes_stay_bytes_until_converted():
    data = images()
    assert data.pixel_values.dtype == torch.uint8
    assert data.as_float().pixel_values.dtype == torch.float32
    assert torch.equal(data.as_float().pixel_values, data.pixel_values / 255)
    assert data.as_float().as_float().pixel_values is not data.pixel_values
    half = data.normalized([0.5, 0.0, 0.0], [0.5, 1.0, 2.0]).pixel_values
    assert torch.allclose(half[:, 0], (data.pixel_values[:, 0] / 255 - 0.5) / 0.5)
    assert torch.allclose(half[:, 2], data.pixel_values[:, 2] / 255 / 2)


@pytest.mark.parametrize(("mean", "std"), [([0.5], [0.5]), ([0.0] * 3, [1.0, 0.0, 1.0])])
def test_a_mean_and_std_that_do_not_fit_the_channels_are_refused(
    mean: list[float], std: list[float]
):
    with pytest.raises(DataError, match=r"these images have 3 channel\(s\); give one mean and one"):
        images().normalized(mean, std)


def test_a_data_loader_reads_every_kind_of_rows():
    batch = next(iter(DataLoader(images(), batch_size=4)))
    assert batch["pixel_values"].shape == (4, 3, 2, 2)
    assert batch["labels"].tolist() == [0, 1, 2, 0]
    texts = Texts(("x", "y"), labels=torch.tensor([1, 0]), classes=("n", "p"))
    batch = next(iter(DataLoader(texts, batch_size=2)))
    assert batch["text"] == ["x", "y"]
    assert set(batch) == {"text", "labels"}


def test_iterating_over_rows_ends():
    assert [row["text"] for row in Texts(("x", "y"))] == ["x", "y"]


def test_a_data_set_prints_its_shape_not_its_content():
    assert repr(images()) == "Images(12 rows: pixel_values 3x2x2 uint8, labels int64)"
    assert repr(Texts(("x", "y"), pairs=("1", "2"))) == "Texts(2 rows: text, text_pair)"
    assert repr(Corpus("a" * 5000)) == "Corpus(5,000 characters)"
    assert repr(Table({"n": ("1",)})) == "Table(1 rows: n)"


def test_a_corpus_splits_into_consecutive_parts():
    first, second = Corpus("abcdefghij").split((0.7, 0.3))
    assert (first.text, second.text) == ("abcdefg", "hij")


def test_a_table_gives_text_or_numbers():
    table = Table({"n": ("1", "2.5"), "w": ("x", "3")})
    assert table.numbers("n").tolist() == [1.0, 2.5]
    assert len(table) == 2
    with pytest.raises(DataError, match=r"'x' in column 'w', row 0, but a number was expected"):
        table.numbers("w")
    with pytest.raises(DataError, match=r"column 'm', but this table has 'n', 'w'; use one of"):
        table["m"]


def test_a_single_number_is_no_column_of_rows() -> None:
    with pytest.raises(DataError, match=r"inputs is a single number, 1.0; give one for each row"):
        Points(torch.tensor(1.0), torch.zeros(1, 1))
