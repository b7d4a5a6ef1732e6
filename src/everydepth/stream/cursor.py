"""The cursor of *drive*: a state between two blocks, with all that the remaining blocks need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from everydepth.stream.rows import as_rows, select_rows
from everydepth.stream.taps import state_key


@dataclass(frozen=True)
class Call:
    """How the model calls one block, without the state itself.

    key: the keyword under which the state travels, or None if it is the first argument.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: str | None

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """A call as it was made, its state taken out."""
        key = state_key(args, kwargs)
        rest = {name: value for name, value in kwargs.items() if name != key}
        return cls(args[1:] if key is None else args, rest, key)

    def __call__(self, module: nn.Module, h: Tensor) -> Any:
        if self.key is None:
            return module(h, *self.args, **self.kwargs)
        return module(*self.args, **{**self.kwargs, self.key: h})

    def exchanged(self, old: Tensor, new: Tensor) -> Call:
        """The same call with another tensor in the place of one, which is known by identity."""
        args = tuple(new if value is old else value for value in self.args)
        kwargs = {key: new if value is old else value for key, value in self.kwargs.items()}
        return Call(args, kwargs, self.key)


@dataclass(frozen=True)
class Cursor:
    """`h` at `depth`, the batch it came from, and the calls of all blocks.

    Cursors are values: stepping gives a new one and leaves the old one usable, so a prefix can be
    shared. The exception is a key/value cache, which blocks extend in place: step a cursor that
    has a cache once.

    >>> stream = ed.as_stream(model)
    >>> cursor = stream.advance(stream.start(test.batch(range(4))), to=2)
    >>> rest = cursor.select(torch.tensor([0, 3]))  # two rows leave, two go on
    >>> stream.logits(stream.advance(rest)).shape
    torch.Size([2, 10])
    """

    depth: int
    h: Tensor
    batch: Mapping[str, Any]
    calls: tuple[Call, ...]
    cache: Any = None
    heads: int | None = None

    @property
    def batch_size(self) -> int:
        return self.h.shape[0]

    def select(self, rows: Tensor) -> Cursor:
        """Keep only these rows (indices or a boolean mask) of the state, the masks and the batch.

        A cache is cut in place, to the same rows.
        """
        rows, size = as_rows(rows), self.batch_size
        if self.cache is not None:
            self.cache.batch_select_indices(rows)
        seen: dict[int, Any] = {}

        def once(call: Call) -> Call:
            # Blocks share their masks and rotary tables: select each object once.
            def pick(value: Any) -> Any:
                if id(value) not in seen:
                    seen[id(value)] = select_rows(value, rows, size, 2, self.heads)
                return seen[id(value)]

            args = tuple(pick(a) for a in call.args)
            return Call(args, {k: pick(v) for k, v in call.kwargs.items()}, call.key)

        return replace(
            self,
            h=self.h.index_select(0, rows.to(self.h.device)),
            batch=select_rows(self.batch, rows, size),
            calls=tuple(once(call) for call in self.calls),
        )
