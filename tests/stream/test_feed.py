"""Data of any kind gives the same batches, and what cannot be right is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from rich.console import Console
from tests.zoo import ENTRIES
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

import everydepth as ed
from everydepth.data import Images, Tokens, batches
from everydepth.errors import BatchError, SettingError
from everydepth.stream import Feed, ResidualStream
from everydepth.stream.feed import as_batch, gives_batches

ROWS = 7
RANDOM = torch.Generator().manual_seed(0)
X, Y = torch.randn(ROWS, 3, 32, 32, generator=RANDOM), torch.arange(ROWS) % 3
IDS, WORDS = (torch.randint(3, 60, (ROWS, 5), generator=RANDOM) for _ in range(2))


class Items(Dataset[Any]):
    """A torch data set of one kind of item."""

    def __init__(self, item: Callable[[int], Any]) -> None:
        self.item = item

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


class InRow(IterableDataset[Any]):
    """Rows one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return ({"pixel_values": x, "labels": y} for x, y in zip(X, Y, strict=True))


def two_at_a_time() -> list[tuple[Tensor, Tensor]]:
    return list(zip(X.split(2), Y.split(2), strict=True))


def mappings() -> list[dict[str, Tensor]]:
    return [{"pixel_values": x, "labels": y} for x, y in two_at_a_time()]


def hub() -> datasets.Dataset:
    rows = {"pixel_values": X.numpy(), "label": Y.tolist(), "name": ["a"] * ROWS}
    return datasets.Dataset.from_dict(rows)


KINDS: dict[str, Callable[[], Any]] = {
    "a list of rows": lambda: [
        {"pixel_values": pixels, "label": int(label), "name": "a row"}
        for pixels, label in zip(X, Y, strict=True)
    ],
    "a list of row tuples": lambda: [
        (pixels, int(label)) for pixels, label in zip(X, Y, strict=True)
    ],
    "rows of ours": lambda: Images(X, Y, ("a", "b", "c")),
    "batches of ours": lambda: batches(Images(X, Y, ("a", "b", "c")), 2),
    "one mapping": lambda: {"pixel_values": X, "labels": Y},
    "a tuple": lambda: (X, Y),
    "a tuple of arrays": lambda: (X.numpy(), Y.numpy()),
    "a tuple of a mapping": lambda: ({"pixel_values": X}, Y),
    "a tuple with a list of labels": lambda: (X, Y.tolist()),
    "items that are mappings": lambda: Items(lambda i: {"pixel_values": X[i], "labels": Y[i]}),
    "items that are tuples": lambda: Items(lambda i: (X[i], int(Y[i]))),
    "items of arrays": lambda: Items(lambda i: (X[i].double().numpy(), np.int32(Y[i]))),
    "a TensorDataset": lambda: TensorDataset(X, Y),
    "a torch IterableDataset": InRow,
    "a list of mappings": mappings,
    "a list of tuples": two_at_a_time,
    "a generator of tuples": lambda: iter(two_at_a_time()),
    "a generator of mappings": lambda: (batch for batch in mappings()),
    "a DataLoader of tuples": lambda: DataLoader(TensorDataset(X, Y), batch_size=2),
    "a DataLoader of mappings": lambda: DataLoader(
        Items(lambda i: {"pixel_values": X[i], "labels": Y[i]}), batch_size=2
    ),
    "a Hugging Face data set": hub,
    "a Hugging Face data set of tensors": lambda: hub().with_format("torch"),
    "a Hugging Face iterable": lambda: hub().to_iterable_dataset(),
}


@pytest.fixture(scope="module")
def vit() -> nn.Module:
    return ENTRIES["ViT"].make()[0]


@pytest.fixture(scope="module")
def stream(vit: nn.Module) -> ResidualStream:
    return ed.as_stream(vit)


@pytest.fixture(scope="module")
def language() -> ResidualStream:
    return ed.as_stream(ENTRIES["GPT2-CausalLM-left"].make()[0])


# -- every kind of data ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_gives_the_same_rows(kind: str, stream: ResidualStream) -> None:
    found = list(Feed(KINDS[kind](), stream))
    assert all(set(batch) == {"pixel_values", "labels"} for batch in found)
    assert torch.equal(torch.cat([batch["pixel_values"] for batch in found]), X)
    assert torch.cat([batch["labels"] for batch in found]).tolist() == Y.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_is_cut_to_a_number_of_rows(kind: str, stream: ResidualStream) -> None:
    found = list(Feed(KINDS[kind](), stream, max_samples=3))
    assert torch.cat([batch["labels"] for batch in found]).tolist() == Y[:3].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind_can_be_chosen_by_number(kind: str, stream: ResidualStream) -> None:
    feed = Feed(KINDS[kind](), stream, only=torch.tensor([1, 4, 5]))
    numbers = torch.cat([rows for rows, _ in feed.numbered()])
    assert numbers.tolist() == [1, 4, 5]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "generator" not in kind])
def test_every_kind_but_a_generator_trains_and_traces(kind: str, vit: nn.Module) -> None:
    data = KINDS[kind]()
    net = ed.EveryDepth(copy.deepcopy(vit), ed.end_to_end())
    size = {} if gives_batches(data) else {"batch_size": 4}
    result = ed.fit(net, data, data, steps=2, lr=1e-12, progress=False, **size)
    assert result.steps == 2
    direct = ed.trace(vit, {"pixel_values": X, "labels": Y}, ["loss"], progress=False)
    assert result.valid["loss"][-1] == pytest.approx(float(direct["loss"][-1]), rel=1e-5)
    traced = ed.trace(vit, data, ["loss"], progress=False)
    np.testing.assert_allclose(traced["loss"], direct["loss"], rtol=1e-5)


def test_ids_and_labels_of_a_language_model_come_as_a_tuple(language: ResidualStream) -> None:
    (batch,) = Feed((IDS, WORDS), language)
    assert torch.equal(batch["input_ids"], IDS)
    assert torch.equal(batch["labels"], WORDS)
    (items,) = Feed(TensorDataset(IDS, WORDS), language)
    assert torch.equal(items["labels"], WORDS)


def test_lists_of_tokens_become_tensors_and_ragged_ones_are_named(language: ResidualStream) -> None:
    rows = datasets.Dataset.from_dict({"input_ids": IDS.tolist(), "text": ["a"] * ROWS})
    (batch,) = Feed(rows, language)
    assert torch.equal(batch["input_ids"], IDS)
    ragged = datasets.Dataset.from_dict({"input_ids": [[3, 4], [5]]})
    with pytest.raises(BatchError, match=r"'input_ids' have shapes \(1,\) and \(2,\); pad them"):
        list(Feed(ragged, language))


def test_rows_of_ours_may_hold_tokens(language: ResidualStream) -> None:
    (batch,) = Feed(Tokens(IDS), language)
    assert torch.equal(batch["input_ids"], IDS)


def test_numbers_of_numpy_take_the_models_precision(stream: ResidualStream) -> None:
    (batch,) = Feed((X.double().numpy(), Y.numpy()), stream)
    assert batch["pixel_values"].dtype == torch.float32
    assert batch["labels"].dtype == torch.int64


def test_the_boxes_of_a_detector_stay_a_list_with_one_entry_an_image() -> None:
    stream = ed.as_stream(ENTRIES["Detr-plain"].make()[0])
    boxes = [{"class_labels": torch.zeros(n), "boxes": torch.rand(n, 4)} for n in (1, 2, 3)]
    items = Items(lambda i: {"pixel_values": X[i], "labels": boxes[i % 3]})
    first, second = Feed(items, stream, batch_size=4)
    assert [len(label["boxes"]) for label in first["labels"]] == [1, 2, 3, 1]
    assert [len(label["boxes"]) for label in second["labels"]] == [2, 3, 1]


def test_a_batch_size_cuts_what_has_none(stream: ResidualStream) -> None:
    for kind in ("a tuple", "rows of ours", "a Hugging Face iterable", "a torch IterableDataset"):
        assert [len(b["labels"]) for b in Feed(KINDS[kind](), stream, batch_size=3)] == [3, 3, 1]


def test_the_number_of_batches_is_known_where_rows_are_counted(stream: ResidualStream) -> None:
    assert Feed((X, Y), stream, batch_size=3).batches == 3
    assert Feed((X, Y), stream, batch_size=3, max_samples=4).batches == 2
    assert Feed(mappings(), stream).batches == 4
    assert Feed(DataLoader(InRow(), batch_size=2), stream).batches is None
    assert Feed(iter(mappings()), stream).batches is None


def test_the_first_batch_can_be_seen_before(stream: ResidualStream) -> None:
    feed = Feed(iter(mappings()), stream)
    assert torch.equal(feed.peek()["labels"], Y[:2])
    assert sum(len(batch["labels"]) for batch in feed) == ROWS


# -- what cannot be right -------------------------------------------------------------------------


def test_a_list_of_two_tensors_is_neither_batches_nor_labels_in_silence(
    stream: ResidualStream, language: ResidualStream
) -> None:
    with pytest.raises(BatchError, match=r"two batches or inputs and labels; pass the tuple"):
        Feed([IDS, WORDS], language)
    with pytest.raises(BatchError, match="a list of two tensors"):
        Feed([X, X], stream)
    assert Feed([X[:4], X[4:]], stream).batches == 2  # of different length: surely batches


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "data is int; pass batches"),
        (b"rows.csv", "data is bytes; pass batches"),
        ([], "the data has no batches"),
        ([(X, Y, Y)], "a batch is tuple; pass mappings with 'pixel_values'"),
        ({"inputs": X}, r"keys \['inputs'\], but .* needs 'pixel_values'"),
    ],
)
def test_what_is_no_data_is_named(data: Any, message: str, stream: ResidualStream) -> None:
    with pytest.raises(BatchError, match=message):
        list(Feed(data, stream))


def test_a_set_of_splits_asks_for_one(stream: ResidualStream) -> None:
    with pytest.raises(BatchError, match="a DatasetDict with 'train'; pass one of them"):
        Feed(datasets.DatasetDict({"train": hub()}), stream)


def test_a_batch_size_for_batches_is_refused(stream: ResidualStream) -> None:
    with pytest.raises(SettingError, match="batch_size=4, but list is already in batches"):
        Feed(mappings(), stream, batch_size=4)


def test_a_generator_is_refused_where_a_second_pass_is_needed(stream: ResidualStream) -> None:
    with pytest.raises(BatchError, match="generator, which can be iterated only once"):
        Feed((batch for batch in mappings()), stream, again=True)


@pytest.mark.parametrize(
    "shuffling",
    [
        lambda: DataLoader(TensorDataset(X, Y), shuffle=True),
        lambda: DataLoader(
            TensorDataset(X, Y), batch_sampler=BatchSampler(RandomSampler(Y), 2, False)
        ),
        lambda: batches(Images(X, Y, ("a", "b", "c")), 2, shuffle=True),
    ],
)
def test_shuffled_data_is_refused_where_row_numbers_matter(
    shuffling: Callable[[], Any], stream: ResidualStream
) -> None:
    data = shuffling()
    assert sum(len(batch["labels"]) for batch in Feed(data, stream)) == ROWS
    for settings in ({"ordered": True}, {"only": torch.tensor([1])}):
        with pytest.raises(BatchError, match="shuffles, so its row numbers are meaningless"):
            Feed(data, stream, **settings)
    with pytest.raises(BatchError, match="shuffles"):
        ed.memorization(stream, data, flipped=[0], progress=False)
    with pytest.raises(BatchError, match="shuffles"):
        ed.audit(stream, data, progress=False)


def test_the_order_of_a_plain_loader_is_trusted(stream: ResidualStream) -> None:
    Feed(DataLoader(TensorDataset(X, Y), batch_size=2), stream, ordered=True)
    Feed(DataLoader(InRow(), batch_size=2), stream, ordered=True)


# -- the bar --------------------------------------------------------------------------------------


def test_the_bar_is_shown_on_a_terminal_only_and_items_pass_through(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from everydepth.progress import shown

    assert list(shown(range(3), "work", total=3)) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=80)
    monkeypatch.setattr("everydepth.progress.Console", lambda **_: terminal)
    assert list(shown(range(3), "work", total=3)) == [0, 1, 2]
    assert "work" in screen.getvalue()
    assert "3/3" in screen.getvalue()
    size = len(screen.getvalue())
    assert list(shown(range(3), "work", total=3, enabled=False)) == [0, 1, 2]
    assert len(screen.getvalue()) == size


def test_a_batch_in_any_form_becomes_a_mapping(stream: ResidualStream) -> None:
    for raw in ((X, Y), [X, Y], {"pixel_values": X, "labels": Y}, [{"pixel_values": X}, Y]):
        assert set(as_batch(raw, stream)) == {"pixel_values", "labels"}
    for raw in (X, [X], X.numpy()):
        assert set(as_batch(raw, stream)) == {"pixel_values"}


def test_numbers_of_any_kind_that_holds_whole_ones_are_read(stream: ResidualStream) -> None:
    """NumPy's tokens are often unsigned, and its files may be of another order of bytes."""
    plain = as_batch((X, Y), stream)
    kinds = (Y.numpy().astype(">i4"), Y.numpy().astype(np.uint16), Y.to(torch.uint32))
    for labels in kinds:
        found = as_batch((X.numpy().astype(">f8"), labels), stream)
        assert torch.equal(found["labels"].long(), plain["labels"])
        found["labels"].unique()  # which torch has for signed numbers only
        torch.testing.assert_close(found["pixel_values"], plain["pixel_values"])


def test_a_tensor_without_rows_of_one_length_is_refused(stream: ResidualStream) -> None:
    ragged = torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged)
    for odd in (ragged, X.to_sparse()):
        with pytest.raises(BatchError, match="nested or sparse; pass a dense one"):
            as_batch(odd, stream)
