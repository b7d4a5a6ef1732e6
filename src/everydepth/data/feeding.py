"""Batches for a model from whatever the user has: rows, a data set, batches, one large batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from everydepth.data.batches import batches
from everydepth.data.sets import Rows
from everydepth.errors import BatchError, SettingError
from everydepth.stream import ResidualStream
from everydepth.stream.rows import select_rows

BATCH_SIZE = 32
Batch = Mapping[str, Any]
Source = Any
"""Rows, a data set of mappings, batches, or one (large) batch."""


class Feed:
    """An iterable of checked batches on the model's device.

    data: rows of `everydepth.data`, a torch data set, an iterable of batches (mappings, tensors or
        `(inputs, labels)`), or one batch, which is cut into pieces of `batch_size` (data that
        already comes in batches keeps its own).
    max_samples: rows to give in all.
    only: numbers of the rows to give; the others are passed over.
    again: refuse data that can be iterated only once.
    """

    def __init__(
        self,
        data: Any,
        stream: ResidualStream,
        *,
        batch_size: int | None = None,
        max_samples: int | None = None,
        only: Tensor | None = None,
        again: bool = False,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("max_samples", max_samples)):
            if value is not None and value < 1:
                raise SettingError(f"{name}={value}; use 1 or more")
        if again and isinstance(data, Iterator):
            raise BatchError(
                f"data is {type(data).__name__}; pass a data set, one batch, or batches that can "
                "be iterated more than once (a list or a DataLoader)"
            )
        self._stream, self._max, self._only = stream, max_samples, only
        self._numbers: Tensor | None = None
        if isinstance(data, Rows) and only is not None:
            # Rows can be picked before they are loaded.
            data, self._numbers = data.subset(only), only
        self._source = _source(data, stream, batch_size)
        self._ahead: Iterator[Any] | None = None

    @property
    def again(self) -> bool:
        """Whether the data can be iterated a second time."""
        return not isinstance(self._source, Iterator)

    def peek(self) -> Batch:
        """The first batch, which the next iteration still gives."""
        ahead = iter(self._source)
        first = next(ahead, None)
        if first is None:
            raise _empty()
        self._ahead = _chained(first, ahead)
        return _mapping(first, self._stream)

    def __iter__(self) -> Iterator[Batch]:
        return (batch for _, batch in self.numbered())

    def shown(self, title: str, progress: bool) -> Iterator[Batch]:
        """The batches, with a progress bar on a terminal if `progress`."""
        return (batch for _, batch in self.numbered(title, progress))

    def numbered(self, title: str = "", progress: bool = False) -> Iterator[tuple[Tensor, Batch]]:
        """Every batch with the numbers of its rows in the data."""
        device = self._stream.device
        first, given = 0, 0
        for raw in self._raw(title, progress):
            batch = _mapping(raw, self._stream)
            rows = self._stream.rows(batch)
            numbers = torch.arange(first, first + rows)
            first += rows
            keep = self._kept(numbers)
            if self._max is not None:
                keep = keep[: self._max - given]
            if len(keep) == 0:
                continue
            if len(keep) < rows:
                batch = _picked(batch, keep, rows)
            given += len(keep)
            chosen = numbers[keep] if self._numbers is None else self._numbers[numbers[keep]]
            yield chosen, _moved(batch, device)
            if given == self._max:
                return
        if first == 0:
            raise _empty()

    def _raw(self, title: str, progress: bool) -> Iterator[Any]:
        source, self._ahead = self._source if self._ahead is None else self._ahead, None
        console = Console(stderr=True)
        hidden = not (progress and console.is_terminal)
        return iter(
            track(source, title, self.batches, console=console, disable=hidden, transient=True)
        )

    @property
    def batches(self) -> int | None:
        """The number of batches, if it is known."""
        if not isinstance(self._source, Sized):
            return None
        total = len(self._source)
        size = getattr(self._source, "batch_size", None)
        if self._max is None or size is None:
            return total
        return min(total, -(-self._max // size))

    def _kept(self, numbers: Tensor) -> Tensor:
        if self._only is None or self._numbers is not None:
            return torch.arange(len(numbers))
        return torch.isin(numbers, self._only).nonzero().flatten()


def gives_batches(data: Any) -> bool:
    """Whether the data comes in batches already, so that a batch size has no say."""
    return isinstance(data, Iterable) and not isinstance(data, Rows | Mapping | Tensor | Dataset)


def first_rows(stream: ResidualStream, batch: Batch, count: int) -> dict[str, Any]:
    """The first rows of a batch, repeated if it has fewer."""
    size = stream.rows(batch)
    return _picked(batch, torch.arange(count, device=stream.device) % size, size)


def _source(data: Any, stream: ResidualStream, batch_size: int | None) -> Iterable[Any]:
    size = BATCH_SIZE if batch_size is None else batch_size
    if isinstance(data, Rows):
        return batches(data, size)
    if isinstance(data, Mapping | Tensor):
        return Pieces(stream.check_batch(cast(Any, data)), stream, size)
    if isinstance(data, Dataset):
        return DataLoader(cast(Any, data), batch_size=size)
    if not isinstance(data, Iterable):
        raise BatchError(
            f"data is {type(data).__name__}; pass an iterable of batches, a data set whose items "
            "are mappings, or one batch"
        )
    return cast(Iterable[Any], data)


class Pieces:
    """One large batch, a few rows at a time; data to be iterated over, also again."""

    def __init__(self, batch: Batch, stream: ResidualStream, size: int) -> None:
        self._batch, self.batch_size, self._rows = batch, size, stream.rows(batch)

    def __len__(self) -> int:
        return -(-self._rows // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for rows in torch.arange(self._rows).split(self.batch_size):
            yield _picked(self._batch, rows, self._rows)


def _mapping(raw: Any, stream: ResidualStream) -> Batch:
    if isinstance(raw, tuple | list) and len(cast(Sequence[Any], raw)) == 2:
        raw = {stream.inputs[0]: raw[0], "labels": raw[1]}
    if not isinstance(raw, Mapping | Tensor):
        raise BatchError(
            f"a batch is {type(raw).__name__}; pass mappings with "
            f"{' or '.join(repr(k) for k in stream.inputs)}, tensors, or (inputs, labels)"
        )
    return stream.check_batch(cast(Any, raw))


def _picked(batch: Batch, rows: Tensor, size: int) -> dict[str, Any]:
    """Rows of every tensor, and of lists with one item a row (the boxes of a detector)."""
    return {
        key: [value[i] for i in rows.tolist()]
        if isinstance(value, list) and len(cast(list[Any], value)) == size
        else select_rows(value, rows, size)
        for key, value in batch.items()
    }


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in cast(Batch, value).items()}
    if isinstance(value, list):
        return [_moved(item, device) for item in cast(list[Any], value)]
    return value


def _chained(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def _empty() -> BatchError:
    return BatchError(
        "the data has no batches; pass at least one sample (a generator that was already used is "
        "empty: pass a list or a DataLoader)"
    )
