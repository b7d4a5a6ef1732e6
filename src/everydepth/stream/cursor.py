"""The cursor of *drive*: a state between two blocks, and everything the next blocks need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from everydepth.config import checked
from everydepth.errors import BatchError
from everydepth.stream.rows import UNKNOWN, as_rows, select_along, select_rows
from everydepth.stream.taps import state_key


@dataclass(frozen=True)
class Call:
    """How the model calls one block: all arguments but the state.

    key: the keyword of the state, or None if it is the first positional argument.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: str | None

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """A recorded call, without its state."""
        key = state_key(args, kwargs)
        rest = {name: value for name, value in kwargs.items() if name != key}
        return cls(args[1:] if key is None else args, rest, key)

    def __call__(self, module: nn.Module, h: Tensor) -> Any:
        if self.key is None:
            return module(h, *self.args, **self.kwargs)
        return module(*self.args, **{**self.kwargs, self.key: h})

    def __getitem__(self, key: str | int) -> Any:
        """An argument, by position (counting the state) or name."""
        return self.args[key - (self.key is None)] if isinstance(key, int) else self.kwargs[key]

    def given(self, values: Mapping[str | int, Any]) -> Call:
        """The same call with some arguments replaced, by position (counting the state) or name."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for key, value in values.items():
            if isinstance(key, int):
                args[key - (self.key is None)] = value
            else:
                kwargs[key] = value
        return Call(tuple(args), kwargs, self.key)

    def same_as(self, other: Call) -> bool:
        """Whether another call has the very same arguments, object by object."""
        if (self.key, len(self.args), [*self.kwargs]) != (
            other.key,
            len(other.args),
            [*other.kwargs],
        ):
            return False
        mine, others = (*self.args, *self.kwargs.values()), (*other.args, *other.kwargs.values())
        return all(a is b for a, b in zip(mine, others, strict=True))

    def exchanged(self, old: Any, new: Any) -> Call:
        """The same call with the argument `old` (by identity) replaced by `new`."""
        args = tuple(new if value is old else value for value in self.args)
        kwargs = {key: new if value is old else value for key, value in self.kwargs.items()}
        return Call(args, kwargs, self.key)


def apart(calls: tuple[Call, ...], place: int) -> tuple[Call, ...]:
    """The calls with copies of the lists and dictionaries that the block at `place` may write to.

    Some blocks leave something there for later ones, which must not change an earlier cursor.
    """
    own = calls[place]
    for value in (*own.args, *own.kwargs.values()):
        if type(value) in (list, dict):
            copied = copy(value)
            calls = tuple(call.exchanged(value, copied) for call in calls)
    return calls


CallAxes = Callable[[Mapping[str, Any]], Sequence[tuple[Sequence[Any], Mapping[str, Any]]]]
"""From a batch to the batch dimensions of every block's arguments."""


@dataclass(frozen=True)
class Cursor:
    """`h` at `depth`, its batch, and the calls of all blocks.

    Cursors are immutable: stepping returns a new one and leaves the old one usable, so that a
    prefix can be shared. A key/value cache is the exception, because blocks extend it in place:
    step a cursor with a cache only once.

    axis: the batch dimension of the state. Rows may share it with something else, such as windows.
    axes: the batch dimensions of the calls' arguments; None to infer them from shapes.
    rows: the number of rows; None for the size of the batch dimension.

    >>> stream = ed.as_stream(model)
    >>> cursor = stream.advance(stream.start(test.batch(range(4))), to=2)
    >>> rest = cursor.select(torch.tensor([0, 3]))  # two rows leave, two continue
    >>> stream.logits(stream.advance(rest)).shape
    torch.Size([2, 10])
    """

    depth: int
    h: Tensor
    batch: Mapping[str, Any]
    calls: tuple[Call, ...]
    cache: Any = None
    heads: int | None = None
    axis: int = 0
    axes: CallAxes | None = None
    rows: int | None = None

    @property
    def batch_size(self) -> int:
        return self.h.shape[self.axis] if self.rows is None else self.rows

    def places(self, rows: Tensor) -> Tensor:
        """Where these rows (indices) are along `axis` of the state."""
        each = self.h.shape[self.axis] // self.batch_size
        return (rows[:, None] * each + torch.arange(each, device=rows.device)).flatten()

    @checked
    def select(self, rows: Tensor) -> Cursor:
        """Keep only these rows (indices or a boolean mask) of the state, the masks and the batch.

        A cache is reduced to the same rows in place.
        """
        rows, size = as_rows(rows), self.batch_size
        try:
            h = self.h.index_select(self.axis, self.places(rows).to(self.h.device))
        except IndexError as error:  # told where it costs nothing: on the CPU
            raise BatchError(f"{error}: the cursor has rows 0 to {size - 1}; use these") from error
        known = () if self.axes is None else self.axes(self.batch)
        if self.cache is not None:
            self.cache.batch_select_indices(rows)
        seen: dict[int, Any] = {}

        def once(call: Call, axes: Any) -> Call:
            # Blocks share their masks and rotary tables: select each object once.
            def pick(value: Any, axes: Any) -> Any:
                if id(value) not in seen:
                    seen[id(value)] = select_along(value, axes, rows, size, self.heads)
                return seen[id(value)]

            in_args, in_kwargs = axes if axes is not None else ((), {})
            args = [pick(a, i) for a, i in zip_longest(call.args, in_args, fillvalue=UNKNOWN)]
            kwargs = {k: pick(v, in_kwargs.get(k, UNKNOWN)) for k, v in call.kwargs.items()}
            return Call(tuple(args[: len(call.args)]), kwargs, call.key)

        return replace(
            self,
            h=h,
            rows=len(rows),
            batch=select_rows(self.batch, rows, size),
            calls=tuple(
                once(call, axes) for call, axes in zip_longest(self.calls, known[: len(self.calls)])
            ),
        )
