"""Training data as epochs of batches that can be entered in the middle, again and exactly.

One batch is one optimizer step of all processes together; each process gets its rows of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from everydepth.data import Batches, Rows
from everydepth.errors import DataError, SettingError
from everydepth.training.config import FitConfig

Batch = dict[str, Any]
TrainData = Dataset[Any] | DataLoader[Any] | Iterable[Mapping[str, Any]]
"""Rows by index, a loader, or a re-iterable of batches."""


class Loader(ABC):
    """Epochs of batches. `steps` is their number in an epoch, None if unknown."""

    steps: int | None

    @abstractmethod
    def epoch(self, number: int, start: int) -> Iterator[Batch]:
        """This process's part of the batches of an epoch, from batch `start` on."""

    def generators(self) -> list[torch.Generator]:
        """Random states that belong to the data and must be restored on resuming."""
        return []

    @abstractmethod
    def describe(self) -> str:
        """What makes it this data; resuming with other data is an error."""


def loader_of(
    data: TrainData, accelerator: Accelerator, config: FitConfig, *, workers: int = 0
) -> Loader:
    if isinstance(data, DataLoader):
        return _FromLoader(cast(DataLoader[Any], data), accelerator, config.seed)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return _FromRows(data, accelerator, config, workers)
    return _FromBatches(cast(Iterable[Mapping[str, Any]], data), accelerator)


class _FromRows(Loader):
    """Batches cut from an order that is a function of seed and epoch."""

    def __init__(
        self,
        data: Dataset[Any],
        accelerator: Accelerator,
        config: FitConfig,
        workers: int,
    ) -> None:
        self.data = data
        self.size = len(cast(Sequence[Any], data))
        if self.size == 0:
            raise DataError("the training data has 0 rows; give at least one")
        # A set smaller than a batch is one batch. Otherwise the rows that do not fill a batch wait
        # for the order of the next epoch: every step then sees the same number of rows.
        self.batch_size = min(config.batch_size, self.size)
        self.rank, self.processes = accelerator.process_index, accelerator.num_processes
        if self.batch_size < self.processes:
            raise SettingError(
                f"a batch of {self.batch_size} rows for {self.processes} processes; use a "
                f"batch_size of {self.processes} or more"
            )
        self.steps = self.batches = self.size // self.batch_size
        self.seed, self.workers, self.shuffle = config.seed, workers, config.shuffle
        self.pinned = accelerator.device.type == "cuda"

    def epoch(self, number: int, start: int) -> Iterator[Batch]:
        order = np.arange(self.size)
        if self.shuffle:
            order = np.random.default_rng([self.seed, number]).permutation(self.size)
        # Workers that draw random numbers must be asked for the batches before, too.
        skips = isinstance(self.data, Rows) or self.workers == 0
        first = start if skips else 0
        parts = [
            order[step * self.batch_size :][: self.batch_size][self.rank :: self.processes].tolist()
            for step in range(first, self.batches)
        ]
        batches = iter(
            DataLoader(
                _WholeBatches(self.data),
                batch_sampler=parts,
                num_workers=self.workers,
                collate_fn=cast(Any, _same),
                pin_memory=self.pinned,
            )
        )
        return _skipped(batches, start - first)

    def describe(self) -> str:
        name = repr(self.data) if isinstance(self.data, Rows) else type(self.data).__name__
        return f"{name}, {self.size} rows"


class _FromLoader(Loader):
    """A user's DataLoader; with several processes accelerate deals its batches out."""

    def __init__(self, loader: DataLoader[Any], accelerator: Accelerator, seed: int) -> None:
        self.given = loader
        if accelerator.num_processes > 1:
            loader = prepare_data_loader(
                loader, put_on_device=False, use_seedable_sampler=True, data_seed=seed
            )
        self.loader: Any = loader
        self.steps = None if isinstance(loader.dataset, IterableDataset) else len(loader)

    def epoch(self, number: int, start: int) -> Iterator[Batch]:
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(number)
        return _skipped(iter(self.loader), start)

    def generators(self) -> list[torch.Generator]:
        found = [self.given.generator, getattr(self.given.sampler, "generator", None)]
        return [g for g in dict.fromkeys(found) if isinstance(g, torch.Generator)]

    def describe(self) -> str:
        steps = "unknown" if self.steps is None else self.steps
        return f"DataLoader of {type(self.given.dataset).__name__}, {steps} batches"


class _FromBatches(Loader):
    """Any iterable of batches; each process takes its rows of every batch."""

    def __init__(self, batches: Iterable[Mapping[str, Any]], accelerator: Accelerator) -> None:
        if not isinstance(batches, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(
                f"training data of type {type(batches).__name__}; give a Dataset of dictionaries, "
                "a DataLoader, or an iterable of batches"
            )
        self.batches = batches
        self.rank, self.processes = accelerator.process_index, accelerator.num_processes
        self.steps = len(cast(Any, batches)) if hasattr(batches, "__len__") else None

    def epoch(self, number: int, start: int) -> Iterator[Batch]:
        if hasattr(self.batches, "set_epoch"):
            cast(Any, self.batches).set_epoch(number)
        part = (_rows(batch, self.rank, self.processes) for batch in self.batches)
        return _skipped(part, start)

    def describe(self) -> str:
        steps = "unknown" if self.steps is None else self.steps
        name = repr(self.batches.data) if isinstance(self.batches, Batches) else ""
        return f"{type(self.batches).__name__}, {steps} batches{name and ' of '}{name}"


class _WholeBatches(Dataset[Batch]):
    """Rows asked for a batch at a time."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.data = data

    def __getitem__(self, index: int) -> Any:
        return self.data[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        if isinstance(self.data, Rows):
            return self.data.batch(indices)
        return default_collate([self.data[index] for index in indices])


def _same(batch: Batch) -> Batch:
    return batch


def _skipped(batches: Iterator[Any], count: int) -> Iterator[Any]:
    for _ in range(count):
        next(batches, None)
    return batches


def _rows(batch: Mapping[str, Any], rank: int, processes: int) -> Batch:
    if processes == 1:
        return dict(batch)
    size = rows_of(batch)
    if size < processes:
        raise DataError(
            f"a batch of {size} rows cannot be shared by {processes} processes; use batches of "
            f"{processes} rows or more"
        )
    return rows_at(batch, slice(rank, None, processes))


def rows_of(batch: Mapping[str, Any]) -> int:
    """The number of rows of a batch."""
    return next(value.shape[0] for value in batch.values() if isinstance(value, Tensor))


def rows_at(batch: Mapping[str, Any], where: slice) -> Batch:
    """Some of the rows of a batch."""
    size = rows_of(batch)

    def part(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == size:
            return value[where]
        if isinstance(value, (list, tuple)) and len(cast(Sequence[Any], value)) == size:
            return value[where]
        return value

    return {key: part(value) for key, value in batch.items()}
