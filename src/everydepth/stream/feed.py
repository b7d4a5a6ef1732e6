"""`Feed`: data of any kind as batches on the model's device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol, TypeGuard, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    default_collate,
)

from everydepth.errors import BatchError, SettingError
from everydepth.progress import shown
from everydepth.stream.contract import BESIDE_INPUTS, ResidualStream
from everydepth.stream.rows import as_rows, as_tensor, numbers_in, pick_rows, whole_numbers
from everydepth.stream.text import in_tokens, is_labeled_text, is_text
from everydepth.stream.wrapping import unwrapped

BATCH_SIZE = 32
Batch = Mapping[str, Any]
Source = Any
"""Data of any kind:

- indexable rows: `everydepth.data`, a torch Dataset or a Hugging Face data set whose items are
  mappings or `(inputs, labels)`, or a list of such items (recognized by a label that is one number,
  or tokens with one dimension);
- text: a string, a list of strings, one per row, or `(texts, labels)`, if the stream was made with
  `tokenizer=`; it is one batch where one is expected;
- one large batch: a mapping, a tensor or array of inputs, or the tuple `(inputs, labels)`;
- streamed rows: a torch or Hugging Face IterableDataset;
- batches: a DataLoader, a list or a generator of mappings, inputs or `(inputs, labels)`.

Arrays become tensors. From a Hugging Face data set or a list of items, only the columns that the
model accepts are used, as in transformers' Trainer, and `label` is renamed to `labels`."""


@runtime_checkable
class RowSource(Protocol):
    """Rows that can be requested by number, several at once."""

    def __len__(self) -> int: ...

    def batch(self, indices: Any) -> dict[str, Any]: ...


class Feed:
    """An iterable of checked batches on the model's device.

    data: see `Source`. Data that is not in batches is divided into batches of `batch_size` (32).
    max_samples: the most rows to return.
    only: the rows to return, by number or as a boolean mask.
    again: refuse data that can be iterated only once.
    ordered: refuse data in random order, whose row numbers would be meaningless.
    move: False leaves batches on their device.

    rows: the number of rows in the data; None if unknown before the first pass.

    >>> from everydepth.stream import Feed
    >>> pixels, labels = test.pixel_values, test.labels
    >>> [len(batch["labels"]) for batch in Feed((pixels[:40], labels[:40]), ed.as_stream(model))]
    [32, 8]
    """

    def __init__(
        self,
        data: Source,
        stream: ResidualStream,
        *,
        batch_size: int | None = None,
        max_samples: int | None = None,
        only: Tensor | None = None,
        again: bool = False,
        ordered: bool = False,
        move: bool = True,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("max_samples", max_samples)):
            if value is not None and value < 1:
                raise SettingError(f"{name}={value}; use 1 or more")
        if again and isinstance(data, Iterator):
            raise BatchError(
                f"data is a {type(data).__name__}, which can be iterated only once; pass a data "
                "set, one batch, or a list of batches"
            )
        if (ordered or only is not None) and not keeps_order(data):
            raise BatchError(
                f"{type(data).__name__} shuffles, so its row numbers are meaningless; pass the "
                "data set itself, or a loader with shuffle=False"
            )
        self._asked = None if only is None else whole_numbers(only, "only")
        self._only = None if self._asked is None else as_rows(self._asked)
        self._stream, self._max = stream, max_samples
        stream.check_loaded()
        self._device = stream.device if move else None
        self._numbers: Tensor | None = None
        rows = by_number(data, stream)
        self.rows: int | None = None if rows is None else len(rows)
        if rows is not None and self._asked is not None:
            # Rows can be selected before they are loaded.
            self._numbers = numbers_in(self._asked, len(rows))
        self._source: Iterable[Any] = (
            batches_of(data, stream, batch_size)
            if rows is None
            else Chunks(rows, batch_size or BATCH_SIZE, self._numbers)
        )
        self._ahead: Iterator[Any] | None = None

    @property
    def again(self) -> bool:
        """Whether the data can be iterated a second time."""
        return not isinstance(self._source, Iterator)

    @property
    def batches(self) -> int | None:
        """The number of batches; None if unknown."""
        total, size = count_of(self._source), getattr(self._source, "batch_size", None)
        if total is None or self._max is None or size is None:
            return total
        return min(total, -(-self._max // size))

    def peek(self) -> Batch:
        """The first batch; the next iteration still includes it."""
        ahead = iter(self._source)
        first = next(ahead, None)
        if first is None:
            raise _empty()
        self._ahead = chain([first], ahead)
        return as_batch(first, self._stream)

    def __iter__(self) -> Iterator[Batch]:
        return (batch for _, batch in self.numbered())

    def shown(self, title: str, progress: bool) -> Iterator[Batch]:
        """The batches, with a progress bar if `progress` and on a terminal."""
        return (batch for _, batch in self.numbered(title, progress))

    def numbered(self, title: str = "", progress: bool = False) -> Iterator[tuple[Tensor, Batch]]:
        """Every batch with the numbers of its rows in the data."""
        source, self._ahead = self._source if self._ahead is None else self._ahead, None
        first, given = 0, 0
        for raw in shown(source, title, total=self.batches, enabled=progress):
            batch = as_batch(raw, self._stream)
            rows = self._stream.rows(batch)
            numbers = torch.arange(first, first + rows)
            first += rows
            keep = self._kept(numbers)
            if self._max is not None:
                keep = keep[: self._max - given]
            if len(keep) == 0:
                continue
            if len(keep) < rows:
                batch = pick_rows(batch, keep, rows)
            given += len(keep)
            chosen = numbers[keep] if self._numbers is None else self._numbers[numbers[keep]]
            yield chosen, batch if self._device is None else moved(batch, self._device)
            if given == self._max:
                return
        if first == 0:
            raise _empty()
        if self.rows is None:
            self.rows = first
            if self._asked is not None:
                numbers_in(self._asked, first)

    def _kept(self, numbers: Tensor) -> Tensor:
        if self._only is None or self._numbers is not None:
            return torch.arange(len(numbers))
        return torch.isin(numbers, self._only).nonzero().flatten()


# -- one batch ------------------------------------------------------------------------------------


def as_batch(raw: Any, stream: ResidualStream) -> Batch:
    """A batch in any form (see `Source`) as a checked mapping of tensors."""
    raw = in_tokens(raw, stream.tokenizer, stream.positions)
    if isinstance(raw, tuple | list):
        parts = cast(Sequence[Any], raw)
        if len(parts) == 2:
            inputs, labels = parts
            own = inputs if isinstance(inputs, Mapping) else {stream.inputs[0]: inputs}
            raw = {**cast(Batch, own), "labels": labels}
        elif len(parts) == 1:
            raw = parts[0]
    if isinstance(raw, Tensor | np.ndarray):
        raw = {stream.inputs[0]: raw}
    if not isinstance(raw, Mapping):
        raise BatchError(
            f"a batch is {type(raw).__name__}; pass mappings with "
            f"{' or '.join(repr(k) for k in stream.inputs)}, tensors, or (inputs, labels)"
        )
    mapping = cast(Batch, raw)
    return stream.check_batch({k: _tensor(k, v, stream) for k, v in mapping.items()})


def first_rows(stream: ResidualStream, batch: Batch, count: int) -> dict[str, Any]:
    """The first `count` rows of a batch, repeated if it has fewer."""
    size = stream.rows(batch)
    return pick_rows(batch, torch.arange(count, device=stream.device) % size, size)


def pieces(batch: Batch, stream: ResidualStream, size: int) -> Iterator[Batch]:
    """A batch in pieces of at most `size` rows."""
    rows = stream.rows(batch)
    for part in torch.arange(rows).split(size):
        yield pick_rows(batch, part, rows)


def _tensor(key: str, value: Any, stream: ResidualStream) -> Any:
    """Arrays and lists of numbers as tensors; anything else unchanged."""
    if isinstance(value, np.ndarray):
        if not (np.issubdtype(value.dtype, np.number) or value.dtype == bool):
            return value
        found = as_tensor(value)
    elif isinstance(value, list) and _is_numeric(cast(list[Any], value)):
        found = _stacked(key, cast(list[Any], value))
    else:
        return as_tensor(value) if isinstance(value, Tensor) else value
    if not found.is_floating_point():
        return found
    # NumPy and Python use float64, which hardly any model does.
    weights = next((p for p in unwrapped(stream.model).parameters() if p.is_floating_point()), None)
    return found.to(torch.get_default_dtype() if weights is None else weights.dtype)


def _is_numeric(value: Any) -> bool:
    """Whether it is a number, an array, a tensor, or a list of these."""
    if isinstance(value, list):
        return len(cast(list[Any], value)) > 0 and _is_numeric(value[0])
    return isinstance(value, bool | int | float | Tensor | np.ndarray | np.number)


def _stacked(key: str, rows: list[Any]) -> Tensor:
    """All rows as one tensor; raise if their shapes differ."""
    tensors = [as_tensor(row) for row in _equally_long(key, rows)]
    shapes = sorted({tuple(t.shape) for t in tensors})
    if len(shapes) > 1:
        raise BatchError(
            f"rows of {key!r} have shapes {shapes[0]} and {shapes[1]}; pad them to one length (and "
            "add an attention_mask), or pass a DataLoader with a collate_fn that does"
        )
    return torch.stack(tensors)


def _equally_long(key: str, rows: list[Any]) -> list[Any]:
    """The rows, with lists as tensors; raise if a list is ragged."""
    return [
        _stacked(key, cast(list[Any], row)) if isinstance(row, list) and row else row
        for row in rows
    ]


def moved(value: Any, device: torch.device) -> Any:
    """A batch on a device, with the mappings and lists in it."""
    if isinstance(value, Tensor):
        if value.is_meta and device.type != "meta":
            raise BatchError(
                f"a tensor of shape {tuple(value.shape)} is on the 'meta' device, where it has no "
                "values; pass one with values"
            )
        # Only a copy to such a device may be used before it is there.
        return value.to(device, non_blocking=device.type == "cuda")
    if isinstance(value, Mapping):
        return {key: moved(item, device) for key, item in cast(Batch, value).items()}
    if isinstance(value, list):
        return [moved(item, device) for item in cast(list[Any], value)]
    return value


# -- indexable rows -------------------------------------------------------------------------------


class Numbered(Dataset[Any]):
    """Indexable rows, also for DataLoader workers, which get a copy.

    batch: rows by number as one batch, in a form that `as_batch` accepts.
    """

    def __init__(self, count: int, batch: Callable[[Sequence[int]], Any]) -> None:
        self._count, self.batch = count, batch

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self.batch([index])

    def __getitems__(self, indices: list[int]) -> Any:
        return self.batch(indices)


def by_number(data: Source, stream: ResidualStream) -> Numbered | None:
    """The data as indexable rows; None if it is streamed or already in batches."""
    if is_text(data) or is_labeled_text(data):
        whole = as_batch(data, stream)
        return Numbered(stream.rows(whole), partial(_text_rows, whole))
    if _is_hub(data):
        if isinstance(data, Mapping):
            splits = ", ".join(map(repr, cast(Batch, data)))
            raise BatchError(
                f"data is a {type(data).__name__} with {splits}; pass one of them: data['train']"
            )
        rows = partial(_hub_rows, data, _taken(stream))
        return Numbered(len(data), rows) if isinstance(data, Sized) else None
    if isinstance(data, RowSource):
        return Numbered(len(data), data.batch)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        items = cast(Any, data)
        return Numbered(len(items), partial(_items, items, None))
    if _is_samples(data):
        samples = cast(list[Any], data)
        return Numbered(len(samples), partial(_items, samples, _taken(stream)))
    if isinstance(data, Mapping | Tensor | np.ndarray) or _is_pair(data):
        whole = as_batch(data, stream)
        size = stream.rows(whole)
        return Numbered(size, partial(_batch_rows, whole, size))
    return None


# Functions rather than closures, because DataLoader workers may have to pickle them.


def _items(items: Any, taken: frozenset[str] | None, indices: Sequence[int]) -> Any:
    """Items of a torch data set or a list, collated."""
    return collated([_columns(items[index], taken) for index in indices])


def _batch_rows(whole: Batch, size: int, indices: Sequence[int]) -> Any:
    """Rows of one large batch."""
    return pick_rows(whole, torch.tensor(indices), size)


def _text_rows(whole: Batch, indices: Sequence[int]) -> Any:
    """Rows of texts, padded to the longest of them instead of all."""
    rows = torch.tensor(indices)
    longest = int(whole["attention_mask"][rows].sum(1).max())
    return {
        key: value[rows, :longest] if key in ("input_ids", "attention_mask") else value[rows]
        for key, value in whole.items()
    }


def _hub_rows(rows: Any, taken: frozenset[str], indices: Sequence[int]) -> Any:
    """Rows of a Hugging Face data set, reduced to the columns that the model accepts."""
    return _columns(rows[list(indices)], taken)


def collated(items: Sequence[Any]) -> Any:
    """Items of a data set as one batch; non-numeric values become lists."""
    first = items[0]
    if isinstance(first, Mapping):
        return {key: _column(key, [item[key] for item in items]) for key in cast(Batch, first)}
    if isinstance(first, tuple | list):
        columns = zip(*items, strict=True)
        return tuple(_column(str(i), list(column)) for i, column in enumerate(columns))
    return _column("inputs", list(items))


def _column(key: str, values: list[Any]) -> Any:
    if not _is_numeric(values[0]):
        return values
    if isinstance(values[0], list) or len({np.shape(value) for value in values}) > 1:
        return _stacked(key, values)
    # In a worker process, default_collate puts tensors into shared memory.
    return default_collate(values) if isinstance(values[0], Tensor) else np.asarray(values)


def _taken(stream: ResidualStream) -> frozenset[str]:
    names = inspect.signature(unwrapped(stream.model).forward).parameters
    return frozenset((*names, *stream.inputs, *BESIDE_INPUTS, "label", "label_ids"))


def _columns(found: Any, taken: frozenset[str] | None) -> Any:
    if taken is None or not isinstance(found, Mapping):
        return found
    found = cast(Batch, found)
    rename = {"label": "labels", "label_ids": "labels"}
    kept = {rename.get(key, key): value for key, value in found.items() if key in taken}
    return kept or dict(found)


# -- streamed rows, and batches -------------------------------------------------------------------


def batches_of(
    data: Source, stream: ResidualStream, batch_size: int | None = None
) -> Iterable[Any]:
    """Data without indexable rows as batches in any form."""
    if comes_in_row(data):
        taken = _taken(stream) if _is_hub(data) else None
        return _InRow(cast(Iterable[Any], data), batch_size or BATCH_SIZE, taken)
    if not isinstance(data, Iterable) or isinstance(data, str | bytes):
        raise BatchError(
            f"data is {type(data).__name__}; pass batches, a data set whose items are mappings, or "
            "one batch"
        )
    if isinstance(data, list) and _could_be_pair(cast(list[Any], data)):
        a, b = (tuple(part.shape) for part in cast(list[Any], data))
        raise BatchError(
            f"data is a list of two tensors, {a} and {b}, which could be two batches or inputs and "
            "labels; pass the tuple (inputs, labels), or a list of mappings"
        )
    if batch_size is not None:
        raise SettingError(
            f"batch_size={batch_size}, but {type(data).__name__} is already in batches; set the "
            "size there, or pass a data set or one large batch"
        )
    return cast(Iterable[Any], data)


class Chunks:
    """Indexable rows, `batch_size` at a time."""

    def __init__(self, rows: Numbered, batch_size: int, only: Tensor | None = None) -> None:
        self.rows, self.batch_size = rows, batch_size
        self.numbers = range(len(rows)) if only is None else only.tolist()

    def __len__(self) -> int:
        return -(-len(self.numbers) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.numbers), self.batch_size):
            yield self.rows.batch(list(self.numbers[start : start + self.batch_size]))


class _InRow:
    """Streamed rows, `batch_size` at a time."""

    def __init__(self, rows: Iterable[Any], batch_size: int, taken: frozenset[str] | None) -> None:
        self.rows, self.batch_size, self.taken = rows, batch_size, taken

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.rows, "set_epoch"):
            cast(Any, self.rows).set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        rows = iter(self.rows)
        while items := list(islice(rows, self.batch_size)):
            yield collated([_columns(item, self.taken) for item in items])


def count_of(data: Any) -> int | None:
    """The length, or None if it has none."""
    try:
        return len(data) if isinstance(data, Sized) else None
    except TypeError:  # a DataLoader of streamed rows
        return None


def gives_batches(data: Source) -> bool:
    """Whether the data is already in batches, so that a batch size does not apply."""
    rows = isinstance(data, RowSource | Mapping | Tensor | np.ndarray | Dataset)
    rows = rows or _is_hub(data) or _is_pair(data) or _is_samples(data)
    rows = rows or is_text(data) or is_labeled_text(data)
    return isinstance(data, Iterable) and not rows


def comes_in_row(data: Source) -> bool:
    """Whether the rows are streamed and cannot be indexed."""
    return isinstance(data, IterableDataset) or (_is_hub(data) and not isinstance(data, Sized))


def size_for(data: Source, batch_size: int) -> int | None:
    """`batch_size`, or None for data that is already in batches."""
    return None if gives_batches(data) else batch_size


def _is_hub(data: Any) -> bool:
    """Whether it is a Hugging Face data set; works without `datasets` installed."""
    return type(data).__module__.partition(".")[0] == "datasets"


def _is_array(value: Any) -> TypeGuard[Tensor | np.ndarray]:
    return isinstance(value, Tensor | np.ndarray)


def _is_pair(data: Any) -> bool:
    """Whether it is one batch, `(inputs, labels)`."""
    if not isinstance(data, tuple) or len(cast(tuple[Any, ...], data)) != 2:
        return False
    inputs, labels = cast(tuple[Any, Any], data)
    if isinstance(inputs, Mapping):
        return not isinstance(labels, Mapping)
    return _is_array(inputs)


def _is_samples(data: Any) -> bool:
    """Whether it is a list of single rows: labels are numbers, or tokens have one dimension."""
    if not isinstance(data, list) or not data:
        return False
    first: Any = data[0]
    if isinstance(first, Mapping):
        labels = (first.get(key) for key in ("labels", "label", "label_ids"))
        return _rank(cast(Batch, first).get("input_ids")) == 1 or 0 in map(_rank, labels)
    return isinstance(first, tuple) and len(first) == 2 and _rank(first[1]) == 0  # pyright: ignore[reportUnknownArgumentType]


def _rank(value: Any) -> int | None:
    """The number of dimensions of a number, array or nested list; None for anything else."""
    if not _is_numeric(value):
        return None
    return 1 + (_rank(value[0]) or 0) if isinstance(value, list) else int(np.ndim(value))


def _could_be_pair(data: list[Any]) -> bool:
    return len(data) == 2 and all(map(_is_array, data)) and len(data[0]) == len(data[1])


def keeps_order(data: Source) -> bool:
    """Whether the data keeps its rows in order, rather than shuffling them."""
    if isinstance(data, DataLoader):
        loader = cast(DataLoader[Any], data)
        if isinstance(loader.dataset, IterableDataset):
            return True
        batches: Any = loader.batch_sampler
        if batches is not None and type(batches) is not BatchSampler:
            return False
        sampler = loader.sampler if batches is None else batches.sampler
        return isinstance(sampler, SequentialSampler)
    return getattr(data, "shuffle", False) is not True


def _empty() -> BatchError:
    return BatchError(
        "the data has no batches; pass at least one sample (a generator that was already iterated "
        "is empty: pass a list or a DataLoader)"
    )
