"""Batches for models called as `model(**batch)`, in an order fixed by seed and epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from jaxtyping import Int
from torch import Tensor

from everydepth.config import Seed, checked
from everydepth.data.sets import Batch, Rows, Texts, Tokens, random_stream
from everydepth.errors import BatchError, DataError
from everydepth.stream import IGNORE_INDEX
from everydepth.stream.text import padded

Transform = Callable[[Batch, torch.Generator], Batch]
"""Changes a batch (normalize, augment, trim); the generator depends on seed, epoch and batch."""


@dataclass(kw_only=True)
class Batches:
    """An iterable of batches; each pass is one epoch with its own order.

    `set_epoch` sets the epoch of the next pass, to resume in the middle of a run.
    """

    data: Rows
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    transform: Transform | None
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"batch_size {self.batch_size}, but it must be at least 1; try 32")
        if len(self) == 0:
            raise DataError(
                f"{len(self.data)} rows give no batch of {self.batch_size}; use more rows, a "
                "smaller batch_size or drop_last=False"
            )

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        whole, rest = divmod(len(self.data), self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def __iter__(self) -> Iterator[Batch]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        random = random_stream(self.seed, epoch)
        size = len(self.data)
        order = torch.from_numpy(random.permutation(size)) if self.shuffle else torch.arange(size)
        for number in range(len(self)):
            batch = self.data.batch(order[number * self.batch_size :][: self.batch_size])
            if self.transform is not None:
                state = random_stream(self.seed, epoch, number).integers(2**63)
                batch = self.transform(batch, torch.Generator().manual_seed(int(state)))
            yield batch


@checked
def batches(
    data: Rows,
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: Seed = 0,
    drop_last: bool = False,
    transform: Transform | None = None,
) -> Batches:
    """The rows in batches, for example `{"pixel_values": ..., "labels": ...}` for images.

    `transform` is applied per batch, so bytes need not become floats for the entire set at once.

    >>> from everydepth.data import batches
    >>> first = next(iter(batches(train, 32, shuffle=True)))
    >>> first["pixel_values"].shape, first["labels"].shape
    (torch.Size([32, 1, 8, 8]), torch.Size([32]))
    """
    return Batches(
        data=data,
        batch_size=batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        transform=transform,
    )


@checked
def trim_padding(batch: Batch, generator: torch.Generator | None = None) -> Batch:
    """A transform that cuts the columns in which every row of the batch is padding.

    >>> from everydepth.data import tokenized, trim_padding
    >>> rows = tokenized(["one", "twenty"], tokenizer, 16)
    >>> trim_padding(rows.batch([0]))["input_ids"].shape
    torch.Size([1, 4])
    """
    if "attention_mask" not in batch:
        raise BatchError(
            f"no attention_mask in a batch of {', '.join(map(str, batch))}; use Tokens"
        )
    used = batch["attention_mask"].any(dim=0).nonzero().flatten()
    width = batch["attention_mask"].shape[1]
    start, stop = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, width)

    def trimmed(key: str, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise BatchError(f"{key} is a {type(value).__name__}; pass a tensor")
        targets = key == "labels" and value.is_floating_point()  # one column per class or value
        fits = value.ndim == 2 and value.shape[1] == width and not targets
        return value[:, start:stop] if fits else value

    return {key: trimmed(key, value) for key, value in batch.items()}


@checked
def tokenized(
    data: Texts | Sequence[str],
    tokenizer: Callable[..., Mapping[str, Any]],
    max_length: int,
    *,
    labels: Literal["classes", "tokens"] | None = None,
    padding: Literal["longest", "max_length"] = "longest",
) -> Tokens:
    """Token ids of texts, padded to one width on the tokenizer's side.

    labels: the classes of the texts, or the tokens themselves for language modeling (the loss
        ignores padding); by default the classes if there are any. A tokenizer without a padding
        token pads with its end token; the attention mask distinguishes the two.

    >>> from everydepth.data import tokenized
    >>> tokenized(["one", "twenty"], tokenizer, 16).input_ids.shape
    torch.Size([2, 7])
    """
    texts = data if isinstance(data, Texts) else Texts(tuple(data))
    if max_length < 1 or len(texts) == 0:
        raise DataError(
            f"max_length {max_length} and {len(texts)} text(s); both must be at least 1"
        )
    if labels == "classes" and texts.labels is None:
        raise DataError("labels='classes', but these texts have no labels; use 'tokens' or None")
    pairs = () if texts.pairs is None else (list(texts.pairs),)
    encoded = tokenizer(list(texts.texts), *pairs, truncation=True, max_length=max_length)
    rows = cast(list[list[int]], encoded["input_ids"])
    width = max_length if padding == "max_length" else max(1, *map(len, rows))
    left = getattr(tokenizer, "padding_side", "right") == "left"
    table = partial(padded, width=width, left=left)
    types = encoded.get("token_type_ids")
    target = texts.labels if labels != "tokens" else table(rows, IGNORE_INDEX)
    return Tokens(
        input_ids=table(rows, pad_token(tokenizer)),
        attention_mask=table([[1] * len(row) for row in rows], 0),
        token_type_ids=None if types is None else table(types, 0),
        labels=target,
    )


def pad_token(tokenizer: Any) -> int:
    """The token to pad with: its padding token, or else the one that ends a text."""
    own = getattr(tokenizer, "pad_token_id", None)
    return int((getattr(tokenizer, "eos_token_id", None) if own is None else own) or 0)


@checked
def token_blocks(
    ids: Int[Tensor, " tokens"] | Sequence[int], length: int, *, stride: int | None = None
) -> Tokens:
    """Blocks of `length` tokens for language modeling, every `stride` (by default `length`).

    Labels equal the ids: causal models shift them by one themselves. A shorter last block is
    dropped.

    >>> from everydepth.data import token_blocks
    >>> token_blocks(list(range(10)), 4).input_ids.tolist()
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    given = torch.as_tensor(ids)
    if given.ndim != 1 or given.is_floating_point() or given.is_complex() or not given.is_cpu:
        raise DataError(
            f"ids have shape {tuple(given.shape)} and type {given.dtype} on {given.device}; give "
            "the tokens of one text after the other, whole numbers in one row"
        )
    stream = given.long()
    step = length if stride is None else stride
    if length < 1 or step < 1:
        raise DataError(f"length {length} and stride {step}; both must be at least 1")
    if len(stream) < length:
        raise DataError(
            f"{len(stream)} tokens, but one block needs {length}; use more text or a smaller length"
        )
    blocks = stream.unfold(0, length, step).contiguous()
    return Tokens(input_ids=blocks, attention_mask=torch.ones_like(blocks), labels=blocks.clone())
