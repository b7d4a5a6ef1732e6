"""Batches from whatever the user has, with the number of every row."""

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

BATCH_SIZE = 64

Data = Any
"""Rows, a Dataset of mappings, one (large) batch, or batches that can be iterated again."""


class Feed:
    """Checked batches on the model's device, each with the numbers of its rows in the data.

    only: numbers of the rows to give; the others are passed over.
    """

    def __init__(
        self,
        data: Data,
        stream: ResidualStream,
        *,
        batch_size: int | None = None,
        max_samples: int | None = None,
        only: Tensor | None = None,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise SettingError(f"batch_size={batch_size}; use 1 or more")
        if max_samples is not None and max_samples < 1:
            raise SettingError(f"max_samples={max_samples}; use 1 or more")
        self._stream, self._max, self._only = stream, max_samples, only
        self._numbers = only if only is not None and isinstance(data, Rows) else None
        size = BATCH_SIZE if batch_size is None else batch_size
        if isinstance(data, Rows):
            # Rows can be picked before they are loaded.
            self._source: Iterable[Any] = batches(data if only is None else data.subset(only), size)
        elif isinstance(data, (Mapping, Tensor)):
            self._source = _pieces(stream.check_batch(cast(Any, data)), stream, size)
        elif isinstance(data, Dataset):
            self._source = DataLoader(cast(Any, data), batch_size=size)
        elif isinstance(data, Iterator) or not isinstance(data, Iterable):
            raise BatchError(
                f"data is {type(data).__name__}; pass a data set, one batch, or batches that can "
                "be iterated more than once (a list or a DataLoader)"
            )
        else:
            self._source = data

    def __len__(self) -> int:
        """The number of batches; 0 where nobody knows."""
        return len(self._source) if isinstance(self._source, Sized) else 0

    def __iter__(self) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
        first, given = 0, 0
        for raw in self._source:
            batch = self._mapping(raw)
            rows = rows_of(self._stream, batch)
            numbers = torch.arange(first, first + rows)
            keep = self._kept(numbers)
            first += rows
            if self._max is not None:
                keep = keep[: self._max - given]
            if len(keep) == 0:
                continue
            if len(keep) < rows:
                batch = select_rows(batch, keep, rows)
            given += len(keep)
            chosen = numbers[keep]
            if self._numbers is not None:
                chosen = self._numbers[chosen]
            yield chosen, {key: _moved(value, self._device()) for key, value in batch.items()}
            if given == self._max:
                return

    def _kept(self, numbers: Tensor) -> Tensor:
        if self._only is None or self._numbers is not None:
            return torch.arange(len(numbers))
        return torch.isin(numbers, self._only).nonzero().flatten()

    def _mapping(self, raw: Any) -> Mapping[str, Any]:
        if isinstance(raw, (tuple, list)) and len(raw) == 2:
            raw = {self._stream.inputs[0]: raw[0], "labels": raw[1]}
        if not isinstance(raw, (Mapping, Tensor)):
            raise BatchError(
                f"a batch is {type(raw).__name__}; pass mappings with "
                f"{' or '.join(repr(k) for k in self._stream.inputs)}, or (inputs, labels)"
            )
        return self._stream.check_batch(cast(Any, raw))

    def _device(self) -> torch.device:
        parameter = next(unwrapped(self._stream.model).parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device


class _pieces:  # noqa: N801 - a function with a length
    """One large batch, a few rows at a time."""

    def __init__(self, batch: Mapping[str, Any], stream: ResidualStream, size: int) -> None:
        self._batch, self._size, self._rows = batch, size, rows_of(stream, batch)

    def __len__(self) -> int:
        return -(-self._rows // self._size)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for start in range(0, self._rows, self._size):
            keep = torch.arange(start, min(start + self._size, self._rows))
            yield select_rows(self._batch, keep, self._rows)


def rows_of(stream: ResidualStream, batch: Mapping[str, Any]) -> int:
    key = next(k for k in stream.inputs if batch.get(k) is not None)
    return batch[key].shape[0]


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
