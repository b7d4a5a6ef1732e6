"""Batches from whatever the user has: a data set, a loader, one large batch; with progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from everydepth.data import Rows, batches
from everydepth.errors import BatchError, SettingError
from everydepth.stream import ResidualStream, unwrapped
from everydepth.stream.rows import select_rows

BATCH_SIZE = 32


def feed(
    stream: ResidualStream,
    data: Any,
    *,
    batch_size: int | None = None,
    progress: bool = False,
    title: str = "",
) -> Iterator[Mapping[str, Any]]:
    """Checked batches on the model's device.

    data: rows of `everydepth.data`, a torch data set, an iterable of batches (mappings, tensors or
    `(inputs, labels)`), or one batch, which is cut into pieces of `batch_size`.
    """
    if batch_size is not None and batch_size < 1:
        raise SettingError(f"batch_size={batch_size}; use 1 or more")
    source = _source(stream, data, BATCH_SIZE if batch_size is None else batch_size)
    device = device_of(stream)
    console = Console(stderr=True)
    hidden = not (progress and console.is_terminal)
    total = len(source) if isinstance(source, Sized) else None
    seen = False
    for raw in track(source, title, total=total, console=console, disable=hidden, transient=True):
        seen = True
        batch = _mapping(stream, raw)
        yield {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    if not seen:
        raise BatchError(
            "the data has no batches; pass at least one sample (a generator that was already "
            "used is empty: pass a list or a DataLoader)"
        )


def device_of(stream: ResidualStream) -> torch.device:
    parameter = next(unwrapped(stream.model).parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def row_count(stream: ResidualStream, batch: Mapping[str, Any]) -> int:
    return batch[next(k for k in stream.inputs if batch.get(k) is not None)].shape[0]


def first_rows(stream: ResidualStream, batch: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The first rows of a batch, repeated if it has fewer."""
    size = row_count(stream, batch)
    rows = torch.arange(count, device=device_of(stream)) % size
    return {k: select_rows(v, rows, size) for k, v in batch.items()}


def _source(stream: ResidualStream, data: Any, size: int) -> Iterable[Any]:
    if isinstance(data, Rows):
        return batches(data, size)
    if isinstance(data, Mapping | Tensor):
        batch = stream.check_batch(cast(Any, data))
        total = row_count(stream, batch)
        pieces = torch.arange(total).split(size)
        return [{k: select_rows(v, rows, total) for k, v in batch.items()} for rows in pieces]
    if isinstance(data, Dataset):
        return DataLoader(cast(Any, data), batch_size=size)
    if isinstance(data, Iterable):
        return data
    raise BatchError(
        f"data is {type(data).__name__}; pass an iterable of batches, a data set whose items are "
        "mappings, or one batch"
    )


def _mapping(stream: ResidualStream, raw: Any) -> Mapping[str, Any]:
    if isinstance(raw, tuple | list) and len(cast(list[Any], raw)) == 2:
        inputs, labels = cast(list[Any], raw)
        raw = {stream.inputs[0]: inputs, "labels": labels}
    if not isinstance(raw, Mapping | Tensor):
        raise BatchError(
            f"a batch is {type(raw).__name__}; pass mappings with "
            f"{' or '.join(repr(k) for k in stream.inputs)}, tensors, or (inputs, labels)"
        )
    return stream.check_batch(cast(Any, raw))
