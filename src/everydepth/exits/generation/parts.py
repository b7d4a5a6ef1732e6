"""Several batches in one call: weights multiply all tokens at once, attention runs for each."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import Tensor, nn

from everydepth.errors import UnsupportedModelError


class Parts:
    """Batches whose tokens stand one after the other in one row of a call.

    A block multiplies all of them by its weights at once, so that rows with few tokens share a call
    with rows that have many. Only attention needs to know which tokens belong together: inside
    `attending`, transformers' `sdpa` runs once for each batch, with its own keys and mask.

    sizes: the rows of each batch, and the tokens of each row.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        self.sizes = sizes
        self.tokens = [rows * count for rows, count in sizes]
        self.found: list[tuple[Tensor, Tensor]] | None = None
        """The keys and values of each batch in this block, from the cache."""
        self.calls = 0
        """How often attention ran."""
        self._masks: dict[int, tuple[Tensor, Sequence[Tensor | None]]] = {}

    def mask(self, masks: Sequence[Tensor | None], like: Tensor) -> Tensor:
        """What stands for these masks, one for each batch, in the call of a block."""
        size = sum(self.tokens)
        one = like.new_zeros(1, 1, 1, 1)
        self._masks[one.data_ptr()] = one, masks
        return one.expand(1, 1, size, size)

    def split(self, states: Tensor, dim: int) -> list[Tensor]:
        """The rows of each batch, from tensors `(1, ...)` with all tokens in `dim`."""
        split = states[0].split(self.tokens, dim - 1)
        return [
            part.unflatten(dim - 1, size).movedim(dim - 1, 0)
            for part, size in zip(split, self.sizes, strict=True)
        ]

    def attend(
        self,
        attention: Callable[..., tuple[Tensor, Any]],
        module: nn.Module,
        query: Tensor,
        mask: Tensor | None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        """`attention` for each batch."""
        known = None if mask is None else self._masks.get(mask.data_ptr())
        found, self.found = self.found, None
        if known is None or found is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} does not take masks, keys and values as they are, so "
                "that batches cannot share its calls"
            )
        self.calls += 1
        out = [
            attention(module, q, keys, values, own, **more)[0]
            for q, (keys, values), own in zip(self.split(query, 2), found, known[1], strict=True)
        ]
        return torch.cat([one.flatten(0, 1) for one in out])[None], None


_here = local()


@contextmanager
def attending(parts: Parts | None) -> Generator[None, None, None]:
    """Inside the context, attention of this thread runs for each batch; None: as ever."""
    before, _here.parts = current(), parts
    try:
        yield
    finally:
        _here.parts = before


def current() -> Parts | None:
    return getattr(_here, "parts", None)
