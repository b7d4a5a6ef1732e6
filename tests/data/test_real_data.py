"""The real data sets against the facts in their manifest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from everydepth.data import Corpus, Images, Table, Texts, load, token_blocks, tokenized
from everydepth.errors import DataError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "split", "shape"),
    [
        ("fashion-mnist", "train", (60_000, 1, 28, 28)),
        ("fashion-mnist", "test", (10_000, 1, 28, 28)),
        ("cifar10", "train", (50_000, 3, 32, 32)),
        ("cifar10", "test", (10_000, 3, 32, 32)),
    ],
)
def test_images_have_the_published_shape_and_balanced_classes(
    data_folder: Path, name: str, split: str, shape: tuple[int, ...]
):
    data = load(name, kind=Images, split=split, root=data_folder)
    assert data.pixel_values.shape == shape
    assert data.pixel_values.dtype == torch.uint8
    assert data.labels.bincount().tolist() == [shape[0] // 10] * 10
    assert len(data.classes) == 10


def test_pixel_means_are_the_published_ones(data_folder: Path):
    fashion = load("fashion-mnist", kind=Images, root=data_folder).pixel_values
    assert float(fashion.double().mean() / 255) == pytest.approx(0.2860, abs=1e-4)
    cifar = load("cifar10", kind=Images, root=data_folder).pixel_values
    means = [float(cifar[:, channel].double().mean() / 255) for channel in range(3)]
    assert means == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)


@pytest.mark.parametrize(
    ("name", "split", "rows", "classes"),
    [
        ("sst2", "train", 60_614, 2),
        ("sst2", "valid", 6_735, 2),
        ("sst2", "test", 872, 2),
        ("cola", "train", 8_551, 2),
        ("cola", "valid", 527, 2),
        ("cola", "test", 516, 2),
        ("rte", "train", 2_127, 2),
        ("rte", "valid", 363, 2),
        ("rte", "dev", 277, 2),
        ("mrpc", "train", 4_076, 2),
        ("mrpc", "test", 1_725, 2),
        ("emotion", "train", 16_000, 6),
        ("emotion", "valid", 2_000, 6),
        ("emotion", "test", 2_000, 6),
        ("20newsgroups", "train", 11_314, 20),
        ("20newsgroups", "test", 7_532, 20),
    ],
)
def test_texts_have_the_published_counts(
    data_folder: Path, name: str, split: str, rows: int, classes: int
):
    data = load(name, kind=Texts, split=split, root=data_folder)
    assert len(data) == rows
    assert len(data.classes) == classes
    assert data.labels is not None
    assert data.labels.unique().tolist() == list(range(classes))
    assert (data.pairs is not None) == (name in {"rte", "mrpc"})
    assert all(data.texts)


def test_rte_test_has_no_labels(data_folder: Path):
    data = load("rte", kind=Texts, split="test", root=data_folder)
    assert (len(data), data.labels) == (3_000, None)


@pytest.mark.parametrize(
    ("task", "rows", "classes"),
    [
        ("emoji", (45_000, 5_000, 50_000), 20),
        ("emotion", (3_257, 374, 1_421), 4),
        ("hate", (9_000, 1_000, 2_970), 2),
        ("irony", (2_862, 955, 784), 2),
        ("offensive", (11_916, 1_324, 860), 2),
        ("stance/abortion", (587, 66, 280), 3),
        ("stance/hillary", (620, 69, 295), 3),
    ],
)
def test_tweeteval_tasks_have_the_sizes_of_the_archive(
    data_folder: Path, task: str, rows: tuple[int, ...], classes: int
):
    parts = [
        load("tweeteval", kind=Texts, task=task, split=split, root=data_folder)
        for split in ("train", "valid", "test")
    ]
    assert tuple(map(len, parts)) == rows
    assert len(parts[0].classes) == classes


def test_tweeteval_sentiment_lacks_its_training_texts(data_folder: Path):
    assert (
        len(load("tweeteval", kind=Texts, task="sentiment", split="test", root=data_folder))
        == 12_284
    )
    with pytest.raises(DataError, match=r"has no sentiment/train_text.txt"):
        load("tweeteval", task="sentiment", root=data_folder)


def test_questions_and_instructions_have_answers(data_folder: Path):
    train = load("gsm8k", kind=Texts, root=data_folder)
    test = load("gsm8k", kind=Texts, split="test", root=data_folder)
    assert (len(train), len(test)) == (7_473, 1_319)
    assert train.pairs is not None
    assert all("####" in answer for answer in train.pairs)
    alpaca = load("alpaca-5000", kind=Texts, root=data_folder)
    assert len(alpaca) == 5_000


def test_corpora_have_the_published_lengths(data_folder: Path):
    # WikiText counts words and, as one more token each, line ends.
    counts = [
        len(text.split()) + text.count("\n")
        for split in ("train", "valid", "test")
        for text in [load("wikitext-2", kind=Corpus, split=split, root=data_folder).text]
    ]
    assert counts == [2_088_628, 217_646, 245_569]
    assert len(load("tinyshakespeare", kind=Corpus, root=data_folder)) == 1_115_394
    bible = load("kjv-bible", kind=Corpus, root=data_folder).text
    assert (len(bible.encode()), bible.split()[0]) == (4_298_239, "Genesis")


def test_the_chinchilla_points_are_numbers(data_folder: Path):
    table = load("chinchilla", kind=Table, root=data_folder)
    assert len(table) == 245
    assert (table.numbers("Model Size") > 0).all()
    assert table.numbers("Training FLOP").isfinite().all()
    assert table.numbers("loss").max() < 10


def test_a_real_tokenizer_feeds_blocks_and_padded_texts(data_folder: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(data_folder / "stories260K")
    text = load("tinyshakespeare", kind=Corpus, root=data_folder).text[:20_000]
    blocks = token_blocks(tokenizer(text)["input_ids"], 128)
    assert blocks.input_ids.shape[1] == 128
    assert int(blocks.input_ids.max()) < 512
    data = load("sst2", kind=Texts, split="test", root=data_folder).subset(range(16))
    tokens = tokenized(data, tokenizer, 32)
    assert tokens.input_ids.shape == (16, 32)
    assert tokens.labels is not None
