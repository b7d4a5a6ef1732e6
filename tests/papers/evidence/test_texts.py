"""Batches of texts, and what a text classifier must beat."""

from __future__ import annotations

import pytest
import torch

from everydepth.data import Texts, Tokens
from everydepth_papers.evidence.texts import by_length, words_accuracy


def tokens(lengths: list[int]) -> Tokens:
    """One row per length; its number is its label."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return Tokens(input_ids=mask * 7, attention_mask=mask, labels=torch.arange(len(lengths)))


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_batches_by_length_hold_every_row_once_and_no_padding_that_can_be_avoided(
    seed: int | None,
) -> None:
    made = by_length(tokens([5, 2, 9, 2, 5, 9]), 2, seed)
    assert sorted(row for batch in made for row in batch["labels"].tolist()) == list(range(6))
    assert all(bool(batch["attention_mask"].all()) for batch in made)


def test_the_order_of_batches_by_length_depends_on_the_seed_alone() -> None:
    rows = tokens(list(range(1, 17)))
    orders = [[b["labels"].tolist() for b in by_length(rows, 2, seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_a_linear_classifier_on_words_reads_both_texts_of_a_pair() -> None:
    # The first text says nothing; the second one has the answer.
    pairs, labels = zip(*[("a warm film", 1), ("a cold film", 0)] * 8, strict=True)
    rows = Texts(("a film",) * 16, pairs=pairs, labels=torch.tensor(labels), classes=("no", "yes"))
    assert words_accuracy(rows, rows) == 1.0
    single = Texts(rows.texts, labels=rows.labels, classes=rows.classes)
    assert words_accuracy(single, single) == 0.5
