"""A recording of one forward pass: every tensor operation and module call, in order."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from everydepth.errors import UnsupportedModelError
from everydepth.stream.block import Computed, Scale
from everydepth.stream.taps import hooked, state_key

Key = tuple[int, int]
"""One value of one tensor: the tensor's id, and how often its memory had been written to."""


@dataclass(frozen=True)
class Operation:
    """One operation, with the values it read and made."""

    name: str
    func: Any
    reads: tuple[Key, ...]
    made: tuple[Key, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass
class ModuleCall:
    """One call of a module: its input and output values, and when it began and ended.

    number: counts the calls of this module, from 0.
    begin, end: how many operations had run before and after it. order: counts finished calls.
    state, key: the value of its first tensor argument, and the keyword of that.
    reads: the values of all arguments. parent, level: the calling module's call, and the nesting.
    given: the value of its first output. made: of all outputs.
    plain: the output is a tensor.
    """

    module: nn.Module
    number: int
    begin: int
    state: Key | None
    key: str | None
    reads: tuple[Key, ...]
    parent: ModuleCall | None
    level: int = 0
    end: int = -1
    order: int = -1
    given: Key | None = None
    made: tuple[Key, ...] = ()
    plain: bool = True
    output: Any = None
    arguments: Mapping[str | int, Any] = field(default_factory=dict[str | int, Any])

    def inside(self, other: ModuleCall) -> bool:
        """Whether it ran inside another call."""
        here = self.parent
        while here is not None and here.level > other.level:
            here = here.parent
        return here is other


@dataclass
class Recording:
    """Operations and module calls of one forward pass, with all their tensors kept alive.

    versions: by memory, how often it was written to. values: tensors by value (a copy if it was
    overwritten later). producers, writers: which operation made a value, or wrote to its memory.
    drops: rates of functional dropout, by output.
    """

    operations: list[Operation] = field(default_factory=list[Operation])
    calls: list[ModuleCall] = field(default_factory=list[ModuleCall])
    tensors: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    versions: dict[int, int] = field(default_factory=dict[int, int])
    values: dict[Key, Tensor] = field(default_factory=dict[Key, Tensor])
    producers: dict[Key, int] = field(default_factory=dict[Key, int])
    writers: dict[Key, int] = field(default_factory=dict[Key, int])
    drops: dict[Key, float] = field(default_factory=dict[Key, float])
    output: Any = None

    def key(self, tensor: Tensor) -> Key:
        """The current value of a tensor."""
        self.tensors[id(tensor)] = tensor
        found = (id(tensor), self.versions.get(_memory(tensor), 0))
        self.values.setdefault(found, tensor)
        return found

    def keys(self, values: Any) -> tuple[Key, ...]:
        return tuple(self.key(tensor) for tensor in tensors_in(values))

    def overwritten(self, key: Key) -> bool:
        """Whether the memory of a value was written to after it was made."""
        return self.versions.get(_memory(self.tensors[key[0]]), 0) > key[1]

    def producer(self, key: Key) -> Operation | None:
        """The operation that made a value; None for inputs and parameters."""
        index = self.producers.get(key)
        return None if index is None else self.operations[index]

    def constant(self, tensor: Tensor, key: Key) -> Scale | None:
        """A value as a parameter, a number, or what is computed of such alone; else None."""
        if key in self.producers:
            return self._computed.get(key)
        given = key in self.calls[0].reads  # a number in the batch
        held = isinstance(tensor, nn.Parameter) or (tensor.numel() == 1 and not given)
        return tensor if held else None

    @cached_property
    def _computed(self) -> Mapping[Key, Computed]:
        found = self.__dict__.setdefault("_computed", {})  # `constant` looks into it meanwhile
        for operation in self.operations:
            read = [argument for argument in operation.args if isinstance(argument, Tensor)]
            keys = (*operation.reads, *operation.made)
            if not read or len(read) != len(operation.reads) or len(operation.made) != 1:
                continue
            random = torch.Tag.nondeterministic_seeded in operation.func.tags
            held = {id(t): self.constant(t, key) for t, key in zip(read, keys, strict=False)}
            if random or None in held.values() or any(version for _, version in keys):
                continue
            args = tuple(held.get(id(argument), argument) for argument in operation.args)
            found[operation.made[0]] = Computed(operation.func, args, operation.kwargs)
        return found

    def origin(self, key: Key) -> int | None:
        """The index of the operation that made a value, or that wrote to a part of it."""
        index = self.producers.get(key)
        if index is None and key[1]:
            index = self.writers.get((_memory(self.tensors[key[0]]), key[1]))
        return index


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError):  # a tensor subclass without memory of its own
        return id(tensor)


def tensors_in(value: Any) -> Iterable[Tensor]:
    """The tensors inside nested tuples, lists and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def first_state(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor | None, str | None]:
    """The first tensor argument of a module, and its keyword."""
    if not any(True for _ in tensors_in((args[:1], kwargs))):
        return None, None
    try:
        key = state_key(args, kwargs)
    except UnsupportedModelError:  # all tensors are nested
        return None, None
    return (args[0] if key is None else kwargs[key]), key


class _Operations(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        recording = self.recording
        reads = recording.keys((args, kwargs))
        written = [
            args[position] if position < len(args) else kwargs.get(argument.name)
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        written = [tensor for tensor in written if isinstance(tensor, Tensor)]
        for tensor in written:
            # The memory is about to be overwritten.
            recording.values[recording.key(tensor)] = tensor.clone()
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            # A value on the meta device. Models ask whether there is padding or packing: say no.
            return args[0].dtype is torch.bool
        summands, alpha = _fused_sum(func, args, kwargs)
        if summands:
            reads = tuple(self._product(*summand) for summand in summands)
        output = func(*args, **kwargs)
        for memory in {_memory(tensor) for tensor in written}:
            recording.versions[memory] = recording.versions.get(memory, 0) + 1
            recording.writers[memory, recording.versions[memory]] = len(recording.operations)
        pieces = self._stacked(func, args)
        if pieces:
            self._added(pieces, output)
            return output
        if summands:
            func, args, kwargs = torch.ops.aten.add.Tensor, (), {"alpha": alpha}
        elif _adds_nothing(func, args):
            func, args = torch.ops.aten.alias.default, args[:1]
        self._record(func, reads, recording.keys(output), args, kwargs)
        return output

    def _stacked(self, func: Any, args: tuple[Any, ...]) -> Sequence[Tensor]:
        """What a sum over an axis adds, if that axis was made by stacking; else nothing."""
        if func is not torch.ops.aten.sum.dim_IntList or len(args) != 2:
            return ()
        whole, summed = args
        made = self.recording.producer(self.recording.key(whole))
        if made is None or made.func is not torch.ops.aten.stack.default:
            return ()
        pieces: Sequence[Tensor] = made.args[0]
        axis = made.args[1] if len(made.args) > 1 else 0
        return pieces if [place % whole.ndim for place in summed] == [axis % whole.ndim] else ()

    def _added(self, pieces: Sequence[Tensor], output: Tensor) -> None:
        """Record a sum of tensors as that of the first two, of this and the third, and so on."""
        total = pieces[0]
        for place, piece in enumerate(pieces[1:], start=2):
            reads, summed = self.recording.keys((total, piece)), (total, piece)
            total = output if place == len(pieces) else total + piece
            self._record(torch.ops.aten.add.Tensor, reads, self.recording.keys(total), summed, {})

    def _product(self, value: Tensor, factor: float | Tensor | None) -> Key:
        """Record a product that a fused operation computes inside; returns its value."""
        if factor is None:
            return self.recording.key(value)
        func, product = torch.ops.aten.mul.Tensor, value * factor
        reads, made = self.recording.keys((value, factor)), self.recording.keys(product)
        self._record(func, reads, made, (value, factor), {})
        return made[0]

    def _record(
        self, func: Any, reads: Sequence[Key], made: Sequence[Key], args: Any, kwargs: Any
    ) -> None:
        recording = self.recording
        for key in made:
            recording.producers.setdefault(key, len(recording.operations))
        name = str(func).removeprefix("aten.")
        recording.operations.append(Operation(name, func, tuple(reads), tuple(made), args, kwargs))


def _adds_nothing(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether it adds the number 0, as Python's `sum` does to what it adds first."""
    return func is torch.ops.aten.add.Tensor and not isinstance(args[1], Tensor) and args[1] == 0


def _fused_sum(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[tuple[Tensor, float | Tensor | None], ...], float]:
    """The two values that an operation adds, with their factors, and what it multiplies the second
    product with; no values if it is no fused sum."""
    name = str(func.overloadpacket).removeprefix("aten.").rstrip("_")
    if name == "addcmul":
        x, a, b = args[:3]
        return ((x, None), (a, b)), float(kwargs.get("value", 1))
    if name == "lerp":
        x, y, weight = args[:3]
        if not isinstance(weight, Tensor):
            return ((x, 1.0 - weight), (y, float(weight))), 1.0
    return (), 1.0


class _Drops(TorchFunctionMode):
    """Records functional dropout, which is not an operation in eval mode."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording, self.inside = recording, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if getattr(func, "__name__", "").startswith("dropout") and not self.inside:
            rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            if isinstance(output, Tensor) and isinstance(rate, (int, float)):
                self.recording.drops[self.recording.key(output)] = float(rate)
        return output


@contextmanager
def recording(model: nn.Module) -> Generator[Recording, None, None]:
    """Record the model's forward passes inside the context."""
    record = Recording()
    drops = _Drops(record)
    numbers: dict[nn.Module, int] = {}
    open_calls: list[ModuleCall] = []
    ended = count()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state, key = first_state(args, kwargs)
        number = numbers.get(module, 0)
        numbers[module] = number + 1
        call = ModuleCall(
            module,
            number,
            len(record.operations),
            None if state is None else record.key(state),
            key,
            record.keys((args, kwargs)),
            open_calls[-1] if open_calls else None,
        )
        call.level = len(open_calls)
        call.arguments = {**dict(enumerate(args)), **kwargs}
        record.calls.append(call)
        open_calls.append(call)
        drops.inside += isinstance(module, nn.Dropout)

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        call = open_calls.pop()
        drops.inside -= isinstance(module, nn.Dropout)
        call.end, call.order = len(record.operations), next(ended)
        call.made, call.output = record.keys(output), output
        call.plain = isinstance(output, Tensor)
        first = output if call.plain else _first(output)
        call.given = record.key(first) if isinstance(first, Tensor) else None

    with ExitStack() as stack:
        for module in model.modules():
            pre = module.register_forward_pre_hook(enter, with_kwargs=True)
            # Registered last, so that it sees the output after other hooks.
            post = module.register_forward_hook(leave)
            stack.enter_context(hooked(pre, post))
        stack.enter_context(drops)
        stack.enter_context(_Operations(record))
        yield record


def _first(output: Any) -> Any:
    if isinstance(output, (tuple, list)) and output:
        return output[0]
    return next(iter(tensors_in(output)), None)
