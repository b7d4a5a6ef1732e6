"""Datasets in memory: immutable rows that `DataLoader` and `batches` read as dictionaries."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor
from torch.utils.data import Dataset

from everydepth.config import brief, checked
from everydepth.errors import DataError

Batch = dict[str, Any]
"""Keyword arguments of one model call: `model(**batch)`."""

MOST_NUMBERED = 100_000
"""A damaged label would otherwise fill the memory with names."""

Indices = Sequence[int] | Tensor

# Not typing.Self: the tests' runtime type checker does not support it on methods.
R = TypeVar("R", bound="Rows")


def random_stream(seed: int, *stream: int) -> np.random.Generator:
    """A generator for `seed`; more numbers (an epoch, a part) give independent streams."""
    if seed < 0:
        raise DataError(f"seed {seed}, but a seed is a whole number from 0 up; use for example 0")
    return np.random.default_rng([seed, *stream])


def numbered(labels: Tensor, source: object) -> tuple[str, ...]:
    """The names of classes that have only numbers."""
    low, high = (int(labels.min()), int(labels.max())) if labels.numel() else (0, -1)
    if low < 0 or high >= MOST_NUMBERED:
        raise DataError(
            f"label {low if low < 0 else high} in {source}, but classes without names are 0 to "
            f"{MOST_NUMBERED - 1:,}; get the data again, or give classes="
        )
    return tuple(map(str, range(high + 1)))


class Rows(Dataset[dict[str, Any]], ABC):
    """The base of datasets with rows. Subclasses are frozen dataclasses that define `KEYS`."""

    KEYS: ClassVar[Mapping[str, str]]
    """Batch key -> field, for each field with rows; a field that is None is left out."""

    def __post_init__(self) -> None:
        for key, column in self.columns().items():
            if isinstance(column, Tensor) and column.ndim == 0:
                name = self.KEYS[key]
                raise DataError(f"{name} is a single number, {column}; give one for each row")
        lengths = {self.KEYS[key]: len(column) for key, column in self.columns().items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name} has {length} rows" for name, length in lengths.items())
            raise DataError(f"{found}, but all need the same number of rows; check the source")

    def columns(self) -> dict[str, Tensor | tuple[str, ...]]:
        """The row data by batch key."""
        found = {key: getattr(self, name) for key, name in self.KEYS.items()}
        return {key: column for key, column in found.items() if column is not None}

    def __len__(self) -> int:
        return len(next(iter(self.columns().values())))

    def __repr__(self) -> str:
        shapes = [
            f"{key} {'x'.join(map(str, column.shape[1:]))} {str(column.dtype)[6:]}".replace(
                "  ", " "
            )
            if isinstance(column, Tensor)
            else key
            for key, column in self.columns().items()
        ]
        return f"{type(self).__name__}({len(self):,} rows: {', '.join(shapes)})"

    def __getitem__(self, index: int) -> Batch:
        return {key: column[index] for key, column in self.columns().items()}

    @checked
    def batch(self, indices: Indices) -> Batch:
        """Several rows at once: tensors stay tensors, texts become lists."""
        chosen = self._checked(indices)
        taken = {key: _take(column, chosen) for key, column in self.columns().items()}
        return {key: list(rows) if isinstance(rows, tuple) else rows for key, rows in taken.items()}

    @checked
    def subset(self: R, indices: Indices) -> R:
        """The rows at `indices` (or where a boolean mask is true), in that order."""
        chosen = self._checked(indices)
        rows = {self.KEYS[key]: _take(column, chosen) for key, column in self.columns().items()}
        return replace(self, **rows)  # pyright: ignore[reportArgumentType, reportUnknownVariableType]  # a dataclass in every subclass

    @checked
    def first(self: R, count: int | None) -> R:
        """The first `count` rows; all of them if there are no more, or if it is None."""
        return self if count is None else self.subset(range(min(count, len(self))))

    @checked
    def split(
        self: R, fractions: Sequence[float], seed: int = 0, *, stratified: bool = False
    ) -> tuple[R, ...]:
        """Disjoint random parts that cover all rows, each in the original order.

        `stratified` keeps the share of every class the same in each part, up to rounding.
        """
        random = random_stream(seed)
        parts: list[list[int]] = [[] for _ in fractions]
        for group in self._groups(stratified):
            order = random.permutation(group)
            for part, (start, stop) in zip(parts, _bounds(fractions, len(order)), strict=True):
                part.extend(order[start:stop].tolist())
        if not all(parts):
            raise DataError(
                f"{len(self)} rows split by {tuple(fractions)} leave a part without rows; "
                "use fewer or larger parts"
            )
        return tuple(self.subset(sorted(part)) for part in parts)

    def _groups(self, stratified: bool) -> list[np.ndarray]:
        if not stratified:
            return [np.arange(len(self))]
        labels = self.columns().get("labels")
        if not isinstance(labels, Tensor) or labels.ndim != 1 or labels.is_floating_point():
            raise DataError(
                f"stratified=True, but this {type(self).__name__} has no class labels; "
                "use stratified=False"
            )
        return [np.flatnonzero(labels.numpy() == label) for label in labels.unique().tolist()]

    def _checked(self, indices: Indices) -> Tensor:
        chosen = torch.as_tensor(indices)
        if chosen.dtype == torch.bool:
            if chosen.shape != (len(self),):
                raise DataError(
                    f"a mask of shape {tuple(chosen.shape)}, but this dataset has {len(self)} "
                    "rows; give one boolean per row"
                )
            return chosen.nonzero().flatten()
        if chosen.is_floating_point() and chosen.numel():
            raise DataError(
                f"indices are {str(chosen.dtype)[6:]}; use whole numbers, or one boolean per row"
            )
        chosen = chosen.long().flatten()
        outside = chosen[(chosen < 0) | (chosen >= len(self))]
        if len(outside):
            raise DataError(
                f"index {outside[0].item()}, but this dataset has {len(self)} rows; "
                f"use 0 to {len(self) - 1}"
            )
        return chosen


def _bounds(fractions: Sequence[float], length: int) -> list[tuple[int, int]]:
    """Start and end of consecutive parts of a whole of this length."""
    if not fractions or min(fractions) <= 0 or abs(sum(fractions) - 1) > 1e-6:
        raise DataError(
            f"fractions {tuple(fractions)}, but they must be positive and add up to 1; "
            "use for example (0.8, 0.1, 0.1)"
        )
    return list(pairwise(np.rint(np.cumsum([0, *fractions]) * length).astype(int).tolist()))


def _take(column: Tensor | tuple[str, ...], indices: Tensor) -> Tensor | tuple[str, ...]:
    if isinstance(column, Tensor):
        return column[indices]
    return tuple(column[index] for index in indices.tolist())


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Images(Rows):
    """Labeled images; bytes until `as_float` or `normalized`."""

    KEYS: ClassVar[Mapping[str, str]] = {"pixel_values": "pixel_values", "labels": "labels"}

    pixel_values: (
        UInt8[Tensor, "rows channels height width"] | Float[Tensor, "rows channels height width"]
    )
    labels: Int[Tensor, " rows"]
    classes: tuple[str, ...]

    def as_float(self) -> Images:
        """Pixels as float32 in 0..1."""
        if self.pixel_values.is_floating_point():
            return self
        return replace(self, pixel_values=self.pixel_values.float().div_(255))

    @checked
    def normalized(self, mean: Sequence[float], std: Sequence[float]) -> Images:
        """`(pixel - mean) / std` per channel, with pixels in 0..1."""
        channels = self.pixel_values.shape[1]
        if len(mean) != channels or len(std) != channels or min(std) <= 0:
            raise DataError(
                f"mean {tuple(mean)} and std {tuple(std)}, but these images have {channels} "
                "channel(s); give one mean and one positive std per channel"
            )
        pixels = self.as_float().pixel_values
        center, scale = (pixels.new_tensor(v).view(1, -1, 1, 1) for v in (mean, std))
        return replace(self, pixel_values=(pixels - center) / scale)


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Points(Rows):
    """Inputs and real-valued targets of a regression."""

    KEYS: ClassVar[Mapping[str, str]] = {"inputs": "inputs", "labels": "labels"}

    inputs: Float[Tensor, "rows features"]
    labels: Float[Tensor, "rows targets"]


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Texts(Rows):
    """Texts, each with an optional second text (a sentence, an answer) and an optional label."""

    KEYS: ClassVar[Mapping[str, str]] = {"text": "texts", "text_pair": "pairs", "labels": "labels"}

    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None = None
    labels: Int[Tensor, " rows"] | None = None
    classes: tuple[str, ...] = ()


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Tokens(Rows):
    """Token ids ready for a model; labels are one class per row or one token per position."""

    KEYS: ClassVar[Mapping[str, str]] = {
        "input_ids": "input_ids",
        "attention_mask": "attention_mask",
        "token_type_ids": "token_type_ids",
        "labels": "labels",
    }

    input_ids: Int[Tensor, "rows tokens"]
    attention_mask: Int[Tensor, "rows tokens"] | None = None
    token_type_ids: Int[Tensor, "rows tokens"] | None = None
    labels: Shaped[Tensor, "rows ..."] | None = None


@checked
@dataclass(frozen=True, repr=False)
class Corpus:
    """One long text."""

    text: str

    def __len__(self) -> int:
        return len(self.text)

    def __repr__(self) -> str:
        return f"Corpus({len(self):,} characters)"

    @checked
    def split(self, fractions: Sequence[float]) -> tuple[Corpus, ...]:
        """Consecutive parts, counted in characters."""
        bounds = _bounds(fractions, len(self.text))
        return tuple(Corpus(self.text[start:stop]) for start, stop in bounds)


@checked
@dataclass(frozen=True, repr=False)
class Table:
    """Named columns of text; `numbers` parses one as numbers."""

    columns: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            if not isinstance(column, tuple | list):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise DataError(f"column {name!r} is {brief(column)}; give its texts as a tuple")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __repr__(self) -> str:
        return f"Table({len(self):,} rows: {', '.join(self.columns)})"

    def __getitem__(self, name: str) -> tuple[str, ...]:
        if name not in self.columns:
            raise DataError(
                f"column {name!r}, but this table has {', '.join(map(repr, self.columns))}; "
                "use one of these"
            )
        return self.columns[name]

    @checked
    def numbers(self, name: str) -> Float[Tensor, " rows"]:
        """The column as float64."""
        values: list[float] = []
        for row, cell in enumerate(self[name]):
            try:
                values.append(float(cell))
            except ValueError as error:
                raise DataError(
                    f"{cell!r} in column {name!r}, row {row}, but a number was expected; "
                    f"read it as text with table[{name!r}]"
                ) from error
        return torch.tensor(values, dtype=torch.float64)


Data = Images | Points | Texts | Corpus | Table
"""What `load` can return."""
