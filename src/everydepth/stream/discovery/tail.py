"""The tail of a network: its own forward with its blocks silent, starting from a given state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from everydepth.errors import UnsupportedModelError
from everydepth.stream.block import Block, Instead
from everydepth.stream.discovery.recording import ModuleCall, tensors_in
from everydepth.stream.taps import parts_of, replaced_forward, silence, state_in


class _Reached(Exception):
    """Stops the model's forward once the wanted value is known; never leaves this module."""


@dataclass
class Tail:
    """Everything in a model but its blocks.

    call: runs the model on a batch and returns its output.
    forms: the form of each block's output.
    skips: block (from 1) -> the module on its skip, if that changes the shape.
    direct: for each depth but the last, whether the next block receives the output unchanged.
    overwrites: the model writes over some of the states.
    """

    call: Callable[[Mapping[str, Any]], Any]
    blocks: Sequence[Block]
    forms: Sequence[Form]
    skips: Mapping[int, nn.Module] = field(default_factory=dict[int, nn.Module])
    direct: Sequence[bool] = ()
    overwrites: bool = False

    def given(self, h: Tensor) -> Tensor:
        """A state as it is given to the model: a copy if the model would write over it."""
        return h.clone() if self.overwrites else h

    def silent(self, h: Tensor, number: int, given: Mapping[str | int, Any]) -> Any:
        """The output of a silent block: the state, through its skip if that changes the shape."""
        skip = self.skips.get(number)
        return self.forms[number - 1].made(h if skip is None else skip(h), given)

    def stand_in(self, number: int, skip: nn.Module | None) -> nn.Module:
        """A module to replace a removed block. skip: the module on the block's skip."""
        form = self.forms[number - 1]
        skip = nn.Identity() if skip is None else skip
        return skip if form.alone else Silent(form, skip)

    def still(self, depth: int) -> bool:
        """Whether silent blocks would carry a state from this depth to the last unchanged."""
        return all(self.direct[depth:]) and not any(number > depth for number in self.skips)

    def output(
        self,
        h: Tensor,
        depth: int,
        batch: Mapping[str, Any],
        seen: list[Mapping[str | int, Any]] | None = None,
    ) -> Any:
        """The model's output if all blocks after `depth` were silent and received `h`.

        seen: filled with the arguments of each block.
        """
        last = {depth: h} if depth == len(self.blocks) else {}
        with self._passing({depth + 1: h}, last, seen=seen):
            return self.call(batch)

    def following(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        """The input of the block after `depth`, if the previous one returned `h`."""
        reached: list[Tensor] = []
        with self._passing({}, {depth: h}, reached, depth + 1):
            try:
                self.call(batch)
            except _Reached:
                return reached[0]
        raise UnsupportedModelError(f"block {depth + 1} was not reached")

    def arriving(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        """The output of the last block if all blocks after `depth` were silent and received `h`."""
        last = len(self.blocks)
        reached: list[Tensor] = []
        with self._passing({depth + 1: h}, {}, reached, last):
            try:
                self.call(batch)
            except _Reached:
                skip = self.skips.get(last)
                return reached[0] if skip is None else skip(reached[0])
        raise UnsupportedModelError(f"block {last} was not reached")

    def input_of(
        self, module: nn.Module, h: Tensor, depth: int, batch: Mapping[str, Any]
    ) -> Tensor:
        """The last input of a module of the tail, if all blocks after `depth` were silent."""
        seen: list[Tensor] = []

        def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[:] = [state_in(args, kwargs)]

        handle = module.register_forward_pre_hook(see, with_kwargs=True)
        try:
            self.output(h, depth, batch)
        finally:
            handle.remove()
        if not seen:
            raise UnsupportedModelError(f"{type(module).__name__} was not called")
        return seen[0]

    def _passing(
        self,
        inputs: Mapping[int, Tensor],
        outputs: Mapping[int, Tensor],
        reached: list[Tensor] | None = None,
        stop: int = 0,
        seen: list[Mapping[str | int, Any]] | None = None,
    ) -> ExitStack:
        """Replace the blocks' forwards; the context restores them.

        inputs, outputs: states to use instead of a block's input or output, by number (from 1).
        reached: gets the input of block `stop`, where the forward ends.
        """
        calls = 0
        inputs = {number: self.given(h) for number, h in inputs.items()}
        outputs = {number: self.given(h) for number, h in outputs.items()}

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            number = calls
            x: Tensor = inputs.get(number, state_in(args, kwargs))
            if reached is not None and number == stop:
                reached.append(x)
                raise _Reached
            if number > len(self.forms):
                raise UnsupportedModelError(
                    f"block {number} of {len(self.forms)} was called: the number of calls depends "
                    "on the data; turn off early stopping and layer drop"
                )
            given = {**dict(enumerate(args)), **kwargs}
            if seen is not None:
                seen.append(given)
            h = outputs.get(number)
            if h is None:
                return self.silent(x, number, given)
            return self.forms[number - 1].made(h, given)

        stack = ExitStack()
        stack.enter_context(silence())
        try:
            for module in dict.fromkeys(block.module for block in self.blocks):
                stack.enter_context(replaced_forward(module, forward))
        except BaseException:
            stack.close()
            raise
        return stack


@dataclass(frozen=True)
class Form:
    """The form of a block's output: the state, or a tuple, list or mapping that starts with it.

    beside: what follows the state: constants, and arguments that are passed on (`Passed`). What the
        block computes itself is None, because a silent block computes nothing.
    keys: the keys, if the output is a mapping. listed: the output is a list.
    carried: arguments of the next block, other than its state, that are items of this output -> the
        item's index.
    alone: the block takes only the state and returns only the state.
    added: the model adds the output to the state itself.
    """

    beside: tuple[Any, ...] | None = None
    keys: tuple[str, ...] | None = None
    listed: bool = False
    carried: Mapping[str | int, int] = field(default_factory=dict[str | int, int])
    alone: bool = False
    added: bool = False

    @classmethod
    def of(cls, call: ModuleCall, then: ModuleCall | None, *, added: bool = False) -> Form:
        """The form, from a call and that of the next block."""
        plain = isinstance(call.output, Tensor)
        keys = tuple(call.output) if isinstance(call.output, Mapping) else None
        values = [call.output] if plain else parts_of(call.output)
        places = {id(value): p for p, value in enumerate(values) if _carries(value)}
        read = {} if then is None else dict(then.arguments)
        read.pop(0 if then is None or then.key is None else then.key, None)
        carried = {key: places[id(value)] for key, value in read.items() if id(value) in places}
        if plain:
            alone = len(call.arguments) == 1 and not added
            return cls(carried=carried, alone=alone, added=added)
        beside = [_beside(value, call.arguments) for value in values[1:]]
        return cls(tuple(beside), keys, isinstance(call.output, list), carried, added=added)

    def made(self, h: Tensor, given: Mapping[str | int, Any]) -> Any:
        """An output of this form for a state. given: the block's arguments."""
        h = Instead.of(h) if self.added else h
        if self.beside is None:
            return h
        rest = [given.get(v.key) if isinstance(v, Passed) else v for v in self.beside]
        if self.keys is not None:
            return dict(zip(self.keys, (h, *rest), strict=True))
        return [h, *rest] if self.listed else (h, *rest)


@dataclass(frozen=True)
class Passed:
    """An argument of the block, by position or keyword."""

    key: str | int


class Silent(nn.Module):
    """Replaces a removed block by what it computes when silent."""

    def __init__(self, form: Form, skip: nn.Module) -> None:
        super().__init__()
        self.form, self.skip = form, skip

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        h = self.skip(state_in(args, kwargs))
        form, given = self.form, {**dict(enumerate(args)), **kwargs}
        return replace(form, added=False).made(torch.zeros_like(h) if form.added else h, given)


def _beside(value: Any, arguments: Mapping[str | int, Any]) -> Any:
    """What a silent block returns in place of another output: see `Form.beside`."""
    passed = (key for key, given in arguments.items() if given is value and given is not None)
    key = next(passed, None)
    made = _tensors(value)
    if key is None and not made and _carries(value):  # an equal tuple, such as image sizes
        key = next((k for k, given in arguments.items() if _equal(given, value)), None)
    if key is not None:
        return Passed(key)
    return None if made else value


def _tensors(value: Any) -> bool:
    return any(True for _ in tensors_in(value))


def _equal(a: Any, b: Any) -> bool:
    return isinstance(a, (tuple, list)) and not _tensors(a) and [*a] == [*b]


def _carries(value: Any) -> bool:
    return isinstance(value, (Tensor, tuple, list))
