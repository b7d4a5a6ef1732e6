"""Batches that can be gone through again and again, from whatever the user has."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from rich.progress import track
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from everydepth.data import Rows, batches
from everydepth.errors import BatchError
from everydepth.stream import ResidualStream, unwrapped
from everydepth.stream.rows import select_rows

BATCH_SIZE = 32
Batch = Mapping[str, Any]


class Feed:
    """Checked batches on the model's device. A generator is read into a list first."""

    def __init__(self, data: Any, stream: ResidualStream, *, batch_size: int | None = None) -> None:
        size = BATCH_SIZE if batch_size is None else batch_size
        self._stream = stream
        self.source: Iterable[Any]
        if isinstance(data, Rows):
            self.source = batches(data, size)
        elif isinstance(data, (Mapping, Tensor)):
            whole = stream.check_batch(cast(Any, data))
            rows = rows_of(stream, whole)
            self.source = [
                select_rows(whole, torch.arange(start, min(start + size, rows)), rows)
                for start in range(0, rows, size)
            ]
        elif isinstance(data, Dataset):
            self.source = DataLoader(cast(Any, data), batch_size=size)
        elif isinstance(data, Iterable):
            self.source = list(data) if isinstance(data, Iterator) else cast(Iterable[Any], data)
        else:
            raise BatchError(
                f"data is {type(data).__name__}; pass batches, a data set whose items are "
                "mappings, or one batch"
            )

    def __iter__(self) -> Iterator[Batch]:
        parameter = next(unwrapped(self._stream.model).parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        empty = True
        for raw in self.source:
            empty = False
            if isinstance(raw, (tuple, list)) and len(cast(Sequence[Any], raw)) == 2:
                raw = {self._stream.inputs[0]: raw[0], "labels": raw[1]}
            batch = self._stream.check_batch(cast(Any, raw))
            yield {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
        if empty:
            raise BatchError("the data has no batches; pass at least one sample")

    def shown(self, what: str, progress: bool) -> Iterable[Batch]:
        """The batches, with a bar on a terminal."""
        length = len(cast(Any, self.source)) if hasattr(self.source, "__len__") else None
        quiet = not (progress and sys.stderr.isatty())
        return track(self, description=what, total=length, disable=quiet, transient=True)


def rows_of(stream: ResidualStream, batch: Batch) -> int:
    return next(batch[k] for k in stream.inputs if batch.get(k) is not None).shape[0]
