from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everydepth.data import (
    Batch,
    Images,
    Points,
    Texts,
    Tokens,
    batches,
    load_digits,
    token_blocks,
    tokenized,
    trim_padding,
)
from everydepth.errors import DataError


def numbered(rows: int) -> Points:
    return Points(torch.arange(rows).float()[:, None], torch.zeros(rows, 1))


def order(passed: Any) -> list[int]:
    return [int(n) for batch in passed for n in batch["inputs"].flatten()]


@given(rows=st.integers(1, 50), size=st.integers(1, 60), shuffle=st.booleans())
def test_a_pass_gives_every_row_once_and_len_counts_the_batches(
    rows: int, size: int, shuffle: bool
):
    loader = batches(numbered(rows), size, shuffle=shuffle)
    passed = list(loader)
    assert len(passed) == len(loader)
    assert sorted(order(passed)) == list(range(rows))
    assert all(len(batch["inputs"]) == size for batch in passed[:-1])


def test_drop_last_leaves_only_whole_batches():
    assert [len(b["inputs"]) for b in batches(numbered(10), 4, drop_last=True)] == [4, 4]


def test_without_shuffling_rows_keep_their_order():
    assert order(batches(numbered(7), 3)) == list(range(7))


def test_the_order_is_fixed_by_seed_and_epoch():
    first, second = (batches(numbered(40), 7, shuffle=True, seed=1) for _ in range(2))
    epochs = [order(first) for _ in range(3)]
    assert epochs == [order(second) for _ in range(3)]
    assert epochs[0] != epochs[1]
    assert epochs[0] != order(batches(numbered(40), 7, shuffle=True, seed=2))
    second.set_epoch(1)
    assert order(second) == epochs[1]


def test_a_batch_of_images_has_the_keywords_of_a_model():
    batch = next(iter(batches(load_digits("valid"), 5)))
    assert {key: tuple(value.shape) for key, value in batch.items()} == {
        "pixel_values": (5, 1, 8, 8),
        "labels": (5,),
    }


def test_a_transform_sees_each_batch_with_a_generator_fixed_by_the_epoch():
    data = Images(torch.zeros(6, 1, 2, 2, dtype=torch.uint8), torch.zeros(6).long(), ("a",))

    def noise(batch: Batch, generator: torch.Generator) -> Batch:
        pixels = batch["pixel_values"].float()
        return batch | {"pixel_values": pixels + torch.rand(pixels.shape, generator=generator)}

    def run() -> list[torch.Tensor]:
        loader = batches(data, 3, transform=noise)
        return [batch["pixel_values"] for _ in range(2) for batch in loader]

    first, second = run(), run()
    assert all(map(torch.equal, first, second))
    assert len({float(pixels.sum()) for pixels in first}) == 4
    assert data.pixel_values.sum() == 0


@pytest.mark.parametrize(
    ("rows", "size", "drop", "message"),
    [
        (5, 0, False, r"batch_size 0, but it must be at least 1; try 32"),
        (0, 4, False, r"0 rows give no batch of 4; use more rows"),
        (3, 4, True, r"3 rows give no batch of 4; .*drop_last=False"),
    ],
)
def test_settings_that_give_no_batch_are_refused(rows: int, size: int, drop: bool, message: str):
    with pytest.raises(DataError, match=message):
        batches(numbered(rows), size, drop_last=drop)


class Letters:
    """A tokenizer of single letters with the calling convention of transformers."""

    def __init__(self, padding_side: str = "right", pad_token_id: int | None = 0) -> None:
        self.padding_side = padding_side
        self.pad_token_id = pad_token_id
        self.eos_token_id = 1

    def __call__(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        truncation: bool,
        max_length: int,
    ) -> dict[str, list[list[int]]]:
        assert truncation
        joined = zip(texts, pairs or [""] * len(texts), strict=True)
        kinds = [[0] * len(a) + [1] * len(b) for a, b in joined]
        joined = zip(texts, pairs or [""] * len(texts), strict=True)
        rows = [[ord(letter) for letter in a + b] for a, b in joined]
        encoded = {"input_ids": [row[:max_length] for row in rows]}
        return encoded | ({"token_type_ids": [k[:max_length] for k in kinds]} if pairs else {})


def test_texts_are_padded_right_or_left_with_a_mask():
    data = Texts(("ab", "abcde"), labels=torch.tensor([1, 0]), classes=("n", "p"))
    right = tokenized(data, Letters(), 4)
    assert right.input_ids.tolist() == [[97, 98, 0, 0], [97, 98, 99, 100]]
    assert right.attention_mask is not None
    assert right.attention_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert right.labels is not None
    assert right.labels.tolist() == [1, 0]
    left = tokenized(data, Letters("left", pad_token_id=None), 6, padding="max_length")
    assert left.input_ids.tolist()[0] == [1, 1, 1, 1, 97, 98]
    assert left.input_ids.shape == (2, 6)


def test_labels_for_language_modeling_ignore_the_padding():
    tokens = tokenized(["ab", "abc", ""], Letters(), 10, labels="tokens")
    assert tokens.labels is not None
    assert tokens.labels.tolist() == [[97, 98, -100], [97, 98, 99], [-100, -100, -100]]
    assert tokenized(["ab"], Letters(), 10).labels is None


def test_pairs_reach_the_tokenizer_and_keep_their_types():
    tokens = tokenized(Texts(("a", "bc"), pairs=("xyz", "x")), Letters(), 10)
    assert tokens.token_type_ids is not None
    assert tokens.token_type_ids.tolist() == [[0, 1, 1, 1], [0, 0, 1, 0]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_trimming_cuts_only_columns_of_padding(side: str):
    data = tokenized(["a", "ab", "abcdef"], Letters(side), 6, labels="tokens")
    short, long = batches(data, 2, transform=trim_padding)
    assert short["input_ids"].shape == short["labels"].shape == (2, 2)
    assert long["input_ids"].shape == (1, 6)
    assert short["attention_mask"].sum() == 3


def test_trimming_leaves_shares_of_classes_alone():
    data = Tokens(
        torch.ones(2, 3).long(), torch.tensor([[1, 0, 0], [1, 1, 0]]), None, torch.eye(3)[:2]
    )
    (found,) = batches(data, 2, transform=trim_padding)
    assert (found["input_ids"].shape, found["labels"].shape) == ((2, 2), (2, 3))


def test_texts_that_cannot_be_tokenized_are_refused():
    with pytest.raises(DataError, match=r"max_length 0 and 1 text\(s\); both must be at least 1"):
        tokenized(["a"], Letters(), 0)
    with pytest.raises(DataError, match=r"labels='classes', but these texts have no labels"):
        tokenized(["a"], Letters(), 4, labels="classes")


def test_blocks_of_tokens_cover_the_stream_without_overlap():
    blocks = token_blocks(range(11), 4)
    assert blocks.input_ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert blocks.labels is not None
    assert torch.equal(blocks.labels, blocks.input_ids)
    assert token_blocks(torch.arange(11), 4, stride=2).input_ids[:, 0].tolist() == [0, 2, 4, 6]


def test_blocks_longer_than_the_stream_are_refused():
    with pytest.raises(DataError, match=r"3 tokens, but one block needs 4; use more text or a"):
        token_blocks([1, 2, 3], 4)
    with pytest.raises(DataError, match=r"length 0 and stride 0; both must be at least 1"):
        token_blocks([1, 2, 3], 0)
