"""Training data as epochs of batches; an epoch can be resumed exactly, at any batch.

All processes share a batch, which is one optimizer step: each process gets some of its rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from everydepth.config import plain
from everydepth.data import Batch, Batches, Rows, Tokens, trim_padding
from everydepth.errors import DataError, SettingError
from everydepth.stream import ResidualStream
from everydepth.stream.feed import (
    Numbered,
    Source,
    as_batch,
    batches_of,
    by_number,
    comes_in_row,
    count_of,
    gives_batches,
    keeps_order,
    size_for,
)
from everydepth.stream.rows import pick_rows
from everydepth.training.config import FitConfig


class Loader(ABC):
    """Epochs of batches.

    steps: the number of batches per epoch; None if unknown.
    """

    stream: ResidualStream
    steps: int | None

    def _checked(self, batches: Iterator[Any]) -> Iterator[Batch]:
        """Batches of any form as dictionaries of tensors."""
        return (dict(as_batch(raw, self.stream)) for raw in batches)

    @abstractmethod
    def epoch(self, number: int, start: int) -> Iterator[Batch]:
        """This process's rows of the batches of an epoch, starting at batch `start`."""

    def generators(self) -> list[torch.Generator]:
        """Random generators of the data, whose state must be restored when resuming."""
        return []

    @abstractmethod
    def describe(self) -> str:
        """A description of the data; resuming with a different one is an error."""


def loader_of(
    data: Source,
    stream: ResidualStream,
    accelerator: Accelerator,
    config: FitConfig,
    *,
    workers: int = 0,
    named: Collection[str] = (),
) -> Loader:
    """The loader for any kind of data.

    named: settings given explicitly, which must not be ignored even if they equal the default.
    """
    _check_obeyed(data, {**plain(config), "workers": workers}, named)
    if isinstance(data, DataLoader):
        return _FromLoader(cast(DataLoader[Any], data), stream, accelerator, config.seed)
    rows = by_number(data, stream)
    if rows is not None:
        return _FromRows(data, rows, stream, accelerator, config, workers)
    batches = batches_of(data, stream, size_for(data, config.batch_size))
    return _FromBatches(data, batches, stream, accelerator, config.grad_accumulation)


def _check_obeyed(data: Source, asked: Mapping[str, Any], named: Collection[str]) -> None:
    """An error if a setting contradicts data that has its own batches, order or workers."""
    batched = gives_batches(data)
    if not (batched or comes_in_row(data)):
        return
    loader = isinstance(data, DataLoader)
    own = {
        "batch_size": getattr(data, "batch_size", None) if batched else asked["batch_size"],
        "shuffle": not keeps_order(data) if loader else getattr(data, "shuffle", False),
        "workers": getattr(data, "num_workers", 0),
    }
    usual = {"batch_size": FitConfig(steps=1).batch_size, "shuffle": True, "workers": 0}
    for name, has in own.items():
        if asked[name] != has and (name in named or asked[name] != usual[name]):
            what = "batches" if batched else "rows in a fixed order"
            raise SettingError(
                f"{name}={asked[name]}, but {type(data).__name__} yields {what}; set it there, or "
                "pass a dataset that can be indexed"
            )


class _FromRows(Loader):
    """Batches of rows in an order that depends only on the seed and the epoch."""

    def __init__(
        self,
        data: Source,
        rows: Numbered,
        stream: ResidualStream,
        accelerator: Accelerator,
        config: FitConfig,
        workers: int,
    ) -> None:
        self.data, self.rows, self.stream = data, rows, stream
        self.size = len(rows)
        if self.size == 0:
            raise DataError("the training data has 0 rows; give at least one")
        # A dataset smaller than a batch is one batch. Otherwise the last, incomplete batch of an
        # epoch is dropped, so that every step has the same number of rows.
        self.batch_size = min(config.batch_size, self.size)
        self.rank, self.processes = accelerator.process_index, accelerator.num_processes
        if self.batch_size < self.processes:
            raise SettingError(
                f"a batch of {self.batch_size} rows for {self.processes} processes; use a "
                f"batch_size of {self.processes} or more"
            )
        _check_pieces(self.batch_size, self.processes, config.grad_accumulation)
        self.steps = self.batches = self.size // self.batch_size
        self.seed, self.workers, self.shuffle = config.seed, workers, config.shuffle
        self.pinned = accelerator.device.type == "cuda"

    def epoch(self, number: int, start: int) -> Iterator[Batch]:
        order = np.arange(self.size)
        if self.shuffle:
            order = np.random.default_rng([self.seed, number]).permutation(self.size)
        # Workers that use random numbers must also load the batches before `start`.
        skips = isinstance(self.data, Rows) or self.workers == 0
        first = start if skips else 0
        parts = [
            order[step * self.batch_size :][: self.batch_size][self.rank :: self.processes].tolist()
            for step in range(first, self.batches)
        ]
        batches = iter(
            DataLoader(
                self.rows,
                batch_sampler=parts,
                num_workers=self.workers,
                collate_fn=cast(Any, _identity),
                pin_memory=self.pinned,
            )
        )
        found = self._checked(_skipped(batches, start - first))
        padded = isinstance(self.data, Tokens) and self.data.attention_mask is not None
        return map(trim_padding, found) if padded else found

    def describe(self) -> str:
        name = repr(self.data) if isinstance(self.data, Rows) else type(self.data).__name__
        return f"{name}, {self.size} rows"


class _FromLoader(Loader):
    """A user's DataLoader; with several processes, accelerate distributes its batches."""

    def __init__(
        self, loader: DataLoader[Any], stream: ResidualStream, accelerator: Accelerator, seed: int
    ) -> None:
        self.given, self.stream = loader, stream
        if accelerator.num_processes > 1:
            loader = prepare_data_loader(
                loader, put_on_device=False, use_seedable_sampler=True, data_seed=seed
            )
        self.loader: Any = loader
        self.steps = count_of(loader)

    def epoch(self, number: int, start: int) -> Iterator[Batch]:
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(number)
        return self._checked(_skipped(iter(self.loader), start))

    def generators(self) -> list[torch.Generator]:
        # A loader that was given a batch sampler has a sampler of its own, which it does not use.
        batches = self.given.batch_sampler
        holders = (self.given, self.given.sampler, batches, getattr(batches, "sampler", None))
        found = [getattr(holder, "generator", None) for holder in holders]
        return [g for g in dict.fromkeys(found) if isinstance(g, torch.Generator)]

    def describe(self) -> str:
        steps = "unknown" if self.steps is None else self.steps
        return f"DataLoader of {type(self.given.dataset).__name__}, {steps} batches"


class _FromBatches(Loader):
    """Any iterable of batches; each process takes its rows of every batch."""

    def __init__(
        self,
        data: Source,
        batches: Iterable[Any],
        stream: ResidualStream,
        accelerator: Accelerator,
        pieces: int,
    ) -> None:
        self.data, self.batches, self.stream, self.pieces = data, batches, stream, pieces
        self.rank, self.processes = accelerator.process_index, accelerator.num_processes
        self.steps = count_of(batches)

    def epoch(self, number: int, start: int) -> Iterator[Batch]:
        if hasattr(self.batches, "set_epoch"):
            cast(Any, self.batches).set_epoch(number)
        whole = _skipped(iter(self.batches), start)
        return map(self._part, self._checked(whole))

    def _part(self, batch: Batch) -> Batch:
        if self.processes == 1:
            return batch
        size = self.stream.rows(batch)
        if size < self.processes:
            raise DataError(
                f"a batch of {size} rows cannot be shared by {self.processes} processes; use "
                f"batches of {self.processes} rows or more"
            )
        _check_pieces(size, self.processes, self.pieces)
        return pick_rows(batch, slice(self.rank, None, self.processes), size)

    def describe(self) -> str:
        steps = "unknown" if self.steps is None else self.steps
        name = repr(self.data.data) if isinstance(self.data, Batches) else ""
        return f"{type(self.data).__name__}, {steps} batches{name and ' of '}{name}"


def _check_pieces(rows: int, processes: int, pieces: int) -> None:
    """Raise if some processes could make the pieces and others not: they would wait for ever."""
    if rows // processes < pieces <= -(-rows // processes):
        raise SettingError(
            f"a batch of {rows} rows cannot be divided into {pieces} pieces on each of {processes} "
            f"processes; use grad_accumulation={rows // processes}, or batches of "
            f"{pieces * processes} rows or more"
        )


def _identity(batch: Any) -> Any:
    return batch


def _skipped(batches: Iterator[Any], count: int) -> Iterator[Any]:
    for _ in range(count):
        next(batches, None)
    return batches
