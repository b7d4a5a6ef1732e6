"""Residual paths in a recording: from one value to a later one, through sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from everydepth.stream.block import Scale, current, times
from everydepth.stream.discovery.recording import Key, ModuleCall, Operation, Recording
from everydepth.stream.taps import first_tensor

# Operations that move entries without changing them.
MOVES = frozenset((
    "view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "transpose", "t", "permute",
    "expand", "contiguous", "alias", "clone", "detach", "_to_copy", "to", "slice", "select",
    "flatten", "unflatten", "lift_fresh", "as_strided", "_reshape_alias", "native_dropout", "roll",
    "split", "split_with_sizes", "index", "constant_pad_nd", "cat", "copy_",
))  # fmt: skip
# Those that keep all entries, as a residual path does.
KEEPS = MOVES - frozenset(
    ["slice", "select", "split", "split_with_sizes", "index", "constant_pad_nd", "cat", "copy_"]
)
_SUMS = frozenset(("add", "add_", "sub", "sub_"))
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu_": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "silu_": nn.SiLU,
    "hardswish": nn.Hardswish,
    "tanh": nn.Tanh,
}


class Times(nn.Module):
    """A constant times a state."""

    def __init__(self, factor: Scale) -> None:
        super().__init__()
        self._factor = (factor,)  # not a parameter of this module: it is the model's

    @property
    def factor(self) -> Scale:
        return self._factor[0]

    def forward(self, x: Tensor) -> Tensor:
        return x * current(self.factor)


class Turned(nn.Module):
    """A module applied to the state with its axes permuted."""

    def __init__(self, module: nn.Module, order: tuple[int, ...]) -> None:
        super().__init__()
        self.module, self.order = module, order

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.permute(self.order))


class First(nn.Module):
    """The first output of a module that has several."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return first_tensor(self.module(x))


class Padded(nn.Module):
    """A state with zeros on both sides along an axis: what is added to a part of the channels."""

    def __init__(self, axis: int, before: int, after: int) -> None:
        super().__init__()
        self.axis, self.before, self.after = axis, before, after

    def forward(self, x: Tensor) -> Tensor:
        behind = x.ndim - 1 - self.axis
        return nn.functional.pad(x, (*[0] * (2 * behind), self.before, self.after))


def base(operation: Operation) -> str:
    """The name of an operation without its overload."""
    return operation.name.partition(".")[0]


@dataclass(frozen=True)
class Skip:
    """What is done to the state before something is added to it, and the calls that did it."""

    module: nn.Module
    calls: tuple[ModuleCall, ...] = ()


@dataclass(frozen=True)
class Sum:
    """One residual connection `after = weight * skip(x) + scale * out`, as recorded values.

    side: the value of `skip(x)`. post: a module applied to the sum. then: the value after it.
    """

    x: Key
    side: Key
    out: Key
    after: Key
    skip: Skip | None = None
    weight: Scale = 1.0
    scale: Scale = 1.0
    post: nn.Module | None = None
    then: Key | None = None

    @property
    def end(self) -> Key:
        return self.after if self.then is None else self.then


class Paths:
    """Residual paths in a recording. calls: the module calls to consider."""

    def __init__(self, recording: Recording, calls: Sequence[ModuleCall]) -> None:
        self.recording, self.calls = recording, calls
        self.by_output: dict[Key, list[ModuleCall]] = {}
        # Including outputs of dropout and drop path, which are identities in eval mode.
        self._given = {call.given for call in calls}
        for call in calls:
            if call.given is not None and call.given != call.state:
                self.by_output.setdefault(call.given, []).append(call)
        self._found: dict[tuple[Key, Key], tuple[Sum, ...] | None] = {}

    def between(self, start: Key, end: Key) -> tuple[Sum, ...] | None:
        """The sums on the path from `start` to `end`, in order; None if there is no such path."""
        memo = (start, end)
        if memo not in self._found:
            self._found[memo] = None  # ends recursion
            self._found[memo] = self._search(start, end)
        return self._found[memo]

    def _search(self, start: Key, end: Key) -> tuple[Sum, ...] | None:
        if start == end:
            return ()
        operation = self.recording.producer(end)
        if operation is None:
            return None
        name = base(operation)
        if name in _SUMS:
            found = self._sum(start, end, operation)
            if found is not None:
                return found
        if name in KEEPS and operation.reads:
            found = self.between(start, operation.reads[0])
            if found is not None:
                return found
        if name in ("mul", "mul_", "div", "div_"):
            value, factor = self.factor(end, start, inside=True)
            return None if value == end else self._after(start, end, value, Times(factor))
        if name == "cat":
            return self._partial(start, end, operation)
        if name in _ACTIVATIONS:
            post = self._activation(end, operation)
            return self._after(start, end, operation.reads[0], post)
        for call in sorted(self.by_output.get(end, ()), key=lambda c: -c.order):
            if call.state is not None and not any(map(_mixes, call.module.modules())):
                post = call.module if call.plain else First(call.module)
                before, order = self.turned(call.state)
                post = post if order is None else Turned(post, order)
                found = self._after(start, end, before, post)
                if found is not None:
                    return found
        # Prefer a module after the sum to explain a bias; otherwise the bias is a summand.
        return self._sum(start, end, operation, biased=True) if name in _SUMS else None

    def _after(
        self, start: Key, end: Key, before: Key, module: nn.Module
    ) -> tuple[Sum, ...] | None:
        """The sums up to `before`, with `module` as the `post` of the last."""
        found = self.between(start, before)
        if not found or found[-1].post is not None:
            return None
        return (*found[:-1], replace(found[-1], post=module, then=end))

    def factor(
        self, key: Key, stop: Key | None = None, *, inside: bool = False
    ) -> tuple[Key, Scale]:
        """A value as another value times a constant, going back no further than `stop`.

        inside: also look into the module that returned the value.
        """
        scale: Scale = 1.0
        while True:
            operation = self.recording.producer(key)
            given = key in self._given and not inside
            inside = False
            if operation is None or key == stop or given or len(operation.args) < 2:
                return key, scale
            name = base(operation).rstrip("_")
            value, by = operation.reads[0], self._constant(operation.args[1])
            if by is None and name == "mul":
                value, by = operation.reads[-1], self._constant(operation.args[0])
            if name not in ("mul", "div") or by is None or operation.kwargs:
                return key, scale
            scale = times(scale, by, divides=name == "div")
            key = value

    def _constant(self, value: Any) -> Scale | None:
        """A number or parameter, or what is computed of such alone; None if it is none of these."""
        if isinstance(value, Tensor):
            return self.recording.constant(value, self.recording.key(value))
        return float(value) if isinstance(value, (int, float)) else None

    def constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, a number, or computed of such alone."""
        return self._constant(tensor) is not None

    def moved(self, key: Key, names: frozenset[str] = KEEPS) -> Key:
        """The value before all operations `names`, which by default only move entries."""
        while True:
            operation = self.recording.producer(key)
            if operation is None or base(operation) not in names or not operation.reads:
                return key
            key = operation.reads[0]

    def turned(self, key: Key) -> tuple[Key, tuple[int, ...] | None]:
        """A value before its axes were permuted, and the permutation; None if there is none."""
        operation = self.recording.producer(key)
        axes = list(range(self.recording.values[key].ndim))
        if operation is not None and base(operation) == "permute":
            return operation.reads[0], tuple(axes[axis] for axis in operation.args[1])
        if operation is not None and base(operation) == "transpose":
            a, b = operation.args[1:3]
            axes[a], axes[b] = axes[b], axes[a]
            return operation.reads[0], tuple(axes)
        return key, None

    def _sum(
        self, start: Key, end: Key, operation: Operation, *, biased: bool = False
    ) -> tuple[Sum, ...] | None:
        if len(operation.reads) < 2:
            return None
        sides = operation.reads[0], operation.reads[1]
        alpha = operation.kwargs.get("alpha", operation.args[2] if len(operation.args) > 2 else 1)
        alpha = -alpha if base(operation).startswith("sub") else alpha
        weights = (1.0, float(alpha))
        options: list[tuple[Sum, ...]] = []
        for i in (0, 1):
            side, weight = self.factor(sides[i], start)
            before = self.between(start, side)
            if before is None:
                continue
            out, scale = self.factor(sides[1 - i])
            if self.constant(self.recording.values[out]) is not biased:
                continue
            before, skip = self._on_skip(before, side, out)
            x = before[-1].end if before else start
            found = Sum(
                x, side, out, end, skip=skip, weight=times(weight, weights[i]),
                scale=times(scale, weights[1 - i]),
            )  # fmt: skip
            options.append((*before, found))
        if options:
            # If both sides lead to the start, a branch has sums inside: the skip is the shorter.
            return min(options, key=len)
        return self._skipped(start, end, sides, weights)

    def _on_skip(
        self, before: tuple[Sum, ...], side: Key, out: Key
    ) -> tuple[tuple[Sum, ...], Skip | None]:
        """If the next branch reads the bare sum, the `post` of the sum is the next skip."""
        if not before or before[-1].post is None:
            return before, None
        last = before[-1]
        given = self.by_output.get(side, ()) if side == last.end else ()
        call = next((call for call in given if call.state == last.after), None)
        read = {key for operation in self.cone(out, last.after) for key in operation.reads}
        if call is None or last.end in read or last.after not in read:
            return before, None
        return (*before[:-1], replace(last, post=None, then=None)), Skip(call.module, (call,))

    def _skipped(
        self, start: Key, end: Key, sides: tuple[Key, Key], weights: tuple[float, float]
    ) -> tuple[Sum, ...] | None:
        """A sum whose skip is a module: the side with fewer operations."""
        options: list[tuple[int, tuple[Sum, ...]]] = []
        for i in (0, 1):
            side, weight = self.factor(sides[i], start)
            for call in self.by_output.get(self.moved(side), ()):
                way = None if call.state is None else self._applied(start, call.state)
                if way is None:
                    continue
                before, first = way
                out, scale = self.factor(sides[1 - i])
                x = before[-1].end if before else start
                effort = call.end - call.begin
                if effort < len(self.cone(out, x)):
                    steps = (*first, call.module)
                    module = nn.Sequential(*steps) if first else call.module
                    found = Sum(
                        x, sides[i], out, end, skip=Skip(module, (call,)),
                        weight=times(weight, weights[i]), scale=times(scale, weights[1 - i]),
                    )  # fmt: skip
                    options.append((effort, (*before, found)))
        return min(options, key=lambda option: option[0])[1] if options else None

    def _applied(self, start: Key, key: Key) -> tuple[tuple[Sum, ...], list[nn.Module]] | None:
        """The sums on the way to a value, and what then acted on every number of it alone."""
        steps: list[nn.Module] = []
        while (found := self.between(start, key)) is None:
            operation = self.recording.producer(key)
            value, factor = self.factor(key, start, inside=True)
            if value != key:
                steps.insert(0, Times(factor))
                key = value
            elif operation is not None and base(operation) in _ACTIVATIONS:
                steps.insert(0, self._activation(key, operation))
                key = operation.reads[0]
            else:
                return None
        return found, steps

    def _activation(self, key: Key, operation: Operation) -> nn.Module:
        """The model's own module that gave a value by an activation; else one of ours."""
        own = (c.module for c in self.by_output.get(key, ()) if c.state == operation.reads[0])
        return next(own, None) or _ACTIVATIONS[base(operation)]()

    def _partial(self, start: Key, end: Key, operation: Operation) -> tuple[Sum, ...] | None:
        """A sum with a part of what is added: the rest of it goes beside the sum."""
        pieces = operation.reads
        axis = operation.args[1] if len(operation.args) > 1 else 0
        for place, piece in enumerate(pieces):
            made = self.recording.producer(piece)
            whole = (
                None if made is None or base(made) not in _SUMS else self._sum(start, piece, made)
            )
            if not whole or whole[-1].skip is not None or whole[-1].post is not None:
                continue
            last = whole[-1]
            out = self.moved(last.out, frozenset(("slice",)))
            parts = [last.out if other == place else key for other, key in enumerate(pieces)]
            values = [self.recording.values[part] for part in parts]
            if not equal(torch.cat(values, axis), self.recording.values[out]):
                continue
            axis %= values[0].ndim
            sizes = [value.shape[axis] for value in values]
            skip = Skip(Padded(axis, sum(sizes[:place]), sum(sizes[place + 1 :])))
            grown = sum(sizes) > sizes[place]
            return (*whole[:-1], replace(last, out=out, after=end, skip=skip if grown else None))
        return None

    def cone(self, value: Key, x: Key) -> list[Operation]:
        """The operations that computed a value, back to `x`."""
        operations = self.recording.operations
        begin = self.recording.producers.get(x, -1)
        seen: set[int] = set()
        todo = [value]
        while todo:
            index = self.recording.origin(todo.pop())
            if index is not None and index > begin and index not in seen:
                seen.add(index)
                todo.extend(operations[index].reads)
        return [operations[i] for i in sorted(seen)]


def _mixes(module: nn.Module) -> bool:
    """Whether a module holds a matrix, and so is not a norm."""
    return any(p.ndim > 1 and min(p.shape[:2]) > 1 for p in module.parameters(recurse=False))


def equal(a: Tensor, b: Tensor) -> bool:
    known = not (a.is_meta or b.is_meta)  # meta tensors have no values
    return known and a.shape == b.shape and torch.equal(a, b)
