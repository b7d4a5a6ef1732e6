"""Batches from whatever the user has: batches, a data set, one batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from everydepth.data import Rows, batches
from everydepth.errors import BatchError, SettingError
from everydepth.stream import ResidualStream, unwrapped
from everydepth.stream.rows import select_rows

BATCH_SIZE = 32


class Feed:
    """An iterable of checked batches on the model's device, at most `max_samples` rows in all.

    again: the data can be iterated a second time. batches: their number, if it is known.
    """

    def __init__(
        self,
        data: Any,
        stream: ResidualStream,
        *,
        batch_size: int | None,
        max_samples: int | None,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise SettingError(f"batch_size={batch_size}; use 1 or more")
        self._stream, self._max = stream, max_samples
        size = BATCH_SIZE if batch_size is None else batch_size
        self._source: Iterable[Any]
        if isinstance(data, Rows):
            self._source = batches(data, size)
        elif isinstance(data, (Mapping, Tensor)):
            self._source = _pieces(stream.check_batch(cast(Any, data)), size)
        elif isinstance(data, Dataset):
            self._source = DataLoader(cast(Any, data), batch_size=size)
        elif isinstance(data, Iterable):
            if batch_size is not None:
                raise SettingError(
                    f"batch_size={batch_size}, but {type(data).__name__} already gives batches; "
                    "set the size there, or pass a data set or one large batch"
                )
            self._source = data
        else:
            raise BatchError(
                f"data is {type(data).__name__}; pass an iterable of batches, a data set whose "
                "items are mappings, or one batch"
            )
        self.again = not isinstance(self._source, Iterator)
        self.batches = self._count(size)
        self._ahead: Iterator[Any] | None = None
        self._first: Any = None

    def peek(self) -> Mapping[str, Any]:
        """The first batch, which the next iteration still gives."""
        self._ahead = iter(self._source)
        try:
            self._first = next(self._ahead)
        except StopIteration:
            raise BatchError(
                "the data has no batches; pass at least one sample (a generator that was already "
                "used is empty: pass a list or a DataLoader)"
            ) from None
        return self._mapping(self._first)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        left = self._max
        for raw in self._raw():
            batch = self._mapping(raw)
            size = batch_rows(self._stream, batch)
            if left is not None and size > left:
                keep = torch.arange(left)
                batch = {k: _first_rows(v, keep, size) for k, v in batch.items()}
                size = left
            yield {k: _moved(v, self._device()) for k, v in batch.items()}
            if left is not None:
                left -= size
                if left == 0:
                    return

    def _raw(self) -> Iterator[Any]:
        if self._ahead is None:
            yield from self._source
            return
        ahead, self._ahead = self._ahead, None
        yield self._first
        yield from ahead

    def _mapping(self, raw: Any) -> Mapping[str, Any]:
        if isinstance(raw, (tuple, list)) and len(raw) == 2:
            inputs, labels = raw
            raw = {self._stream.inputs[0]: inputs, "labels": labels}
        if not isinstance(raw, (Mapping, Tensor)):
            raise BatchError(
                f"a batch is {type(raw).__name__}; pass mappings with "
                f"{' or '.join(repr(k) for k in self._stream.inputs)}, tensors, or (inputs, labels)"
            )
        return self._stream.check_batch(cast(Any, raw))

    def _device(self) -> torch.device:
        parameter = next(unwrapped(self._stream.model).parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    def _count(self, size: int) -> int | None:
        if not isinstance(self._source, Sized):
            return None
        total = len(self._source)
        return total if self._max is None else min(total, -(-self._max // size))


class _pieces:  # noqa: N801 - a function with a length
    """One large batch, a few rows at a time."""

    def __init__(self, batch: Mapping[str, Any], size: int) -> None:
        self._batch, self._size = batch, size
        self._rows = max(v.shape[0] for v in batch.values() if isinstance(v, Tensor) and v.ndim)

    def __len__(self) -> int:
        return -(-self._rows // self._size)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for start in range(0, self._rows, self._size):
            keep = torch.arange(start, min(start + self._size, self._rows))
            yield {k: _first_rows(v, keep, self._rows) for k, v in self._batch.items()}


def batch_rows(stream: ResidualStream, batch: Mapping[str, Any]) -> int:
    key = next(k for k in stream.inputs if batch.get(k) is not None)
    return batch[key].shape[0]


def _first_rows(value: Any, keep: Tensor, size: int) -> Any:
    if isinstance(value, list) and len(cast(list[Any], value)) == size:
        return [value[i] for i in keep.tolist()]
    return select_rows(value, keep, size)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {k: _moved(v, device) for k, v in value.items()}
    return [_moved(v, device) for v in cast(list[Any], value)] if isinstance(value, list) else value
