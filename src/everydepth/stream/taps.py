"""Hooks that are always removed, and records of residual connections made with them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from everydepth.errors import UnsupportedModelError
from everydepth.stream.block import Block

# Keywords under which a block or a branch may receive the state.
STATE_KEYS = ("hidden_states", "hidden_state", "x", "input")


def state_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The keyword of the state, or None if it is the first positional argument."""
    if args and isinstance(args[0], Tensor):
        return None
    found = [key for key in STATE_KEYS if isinstance(kwargs.get(key), Tensor)]
    found += [key for key, value in kwargs.items() if isinstance(value, Tensor)]
    if found:
        return found[0]
    raise UnsupportedModelError(
        f"a block was called with {len(args)} positional arguments and keywords {sorted(kwargs)}, "
        "but no tensor comes first or as a keyword; wrap the block so that the state comes first"
    )


def state_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The state that a block or a branch was called with."""
    key = state_key(args, kwargs)
    return args[0] if key is None else kwargs[key]


def with_state(
    args: tuple[Any, ...], kwargs: dict[str, Any], h: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with another state."""
    key = state_key(args, kwargs)
    return ((h, *args[1:]), kwargs) if key is None else (args, {**kwargs, key: h})


def first_tensor(output: Any) -> Tensor:
    """The output itself, or the first item of a tuple or mapping."""
    if isinstance(output, Mapping):
        return next(iter(output.values()))
    return output if isinstance(output, Tensor) else output[0]


def parts_of(output: Any) -> list[Any]:
    """The items of an output, in order."""
    if isinstance(output, Tensor):
        return [output]
    return list(output.values() if isinstance(output, Mapping) else output)


def with_first_tensor(output: Any, value: Tensor) -> Any:
    """`output` with its first tensor replaced, in the same form."""
    if isinstance(output, Mapping):
        return {**output, next(iter(output)): value}
    if isinstance(output, list):
        return [value, *output[1:]]
    return value if isinstance(output, Tensor) else (value, *output[1:])


def version(h: Tensor) -> int | None:
    """How often the memory of a tensor was written to; None where that is not counted."""
    return None if torch.compiler.is_compiling() or h.is_inference() else h._version


_silence: ContextVar[int] = ContextVar("silence", default=0)


def listening() -> Callable[[], bool]:
    """For hooks that record: whether a forward is of the pass they were made for.

    Others compute only a readout, with silent blocks, or look at the model once.
    """
    own = _silence.get()
    return lambda: _silence.get() == own


@contextmanager
def silence() -> Generator[None, None, None]:
    """Hide calls of blocks from the recording hooks that are there already, inside the context."""
    token = _silence.set(_silence.get() + 1)
    try:
        yield
    finally:
        _silence.reset(token)


@contextmanager
def hooked(*handles: RemovableHandle) -> Generator[None, None, None]:
    """Remove these hooks at the end of the context, even after an error."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Generator[None, None, None]:
    """Replace one module's `forward` inside the context."""
    missing = object()
    before = module.__dict__.get("forward", missing)
    module.forward = forward
    try:
        yield
    finally:
        if before is missing:
            del module.forward
        else:
            module.forward = before


@dataclass(frozen=True)
class BranchRecord:
    """One residual connection of a forward pass: `after = post(skip(x) + out)`.

    `x` and `out` are the block's own tensors, part of the autograd graph. Some blocks flatten
    tokens into rows for their MLP; `x.view(shape)` has the shape of the stream.
    """

    x: Tensor
    out: Tensor
    shape: torch.Size


BlockSeen = Callable[[int, Sequence[BranchRecord]], None]


@contextmanager
def record_branches(
    blocks: Sequence[Block], *, copy: bool = False, to: BlockSeen | None = None
) -> Generator[list[list[BranchRecord]], None, None]:
    """Record `x` and `out` of every branch of every block during the next forward pass.

    The tensors are part of the autograd graph, so a gradient at `x` includes the skip path.

    copy: keep the value of `out` even if the block adds the skip in place.
    to: called with the index of a block (from 0) and its records as the block ends. They are then
        not kept, so that memory holds the records of one block at a time.
    """
    listens = listening()
    records: list[list[BranchRecord]] = [[] for _ in blocks]
    places: dict[nn.Module, list[int]] = {}
    for index, block in enumerate(blocks):
        places.setdefault(block.module, []).append(index)

    def tap(stack: ExitStack, indices: list[int]) -> None:
        """Record one module, which serves as one block or, if called repeatedly, as several."""
        shape: list[torch.Size] = []
        calls: dict[nn.Module, int] = {}
        xs: dict[int, Tensor] = {}
        outs: dict[int, Tensor] = {}
        passes = iter(indices)
        branches = blocks[indices[0]].branches
        waiting = {(b.out, b.call): i for i, b in enumerate(branches)}

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not listens():
                return
            shape[:] = [state_in(args, kwargs).shape]  # empty outside of this module
            calls.clear()

        def see_x(i: int) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if not listens() or not shape or i in xs:
                    return
                x = state_in(args, kwargs)
                xs[i] = x.clone() if blocks[indices[0]].overwrites else x

            return hook

        def see_out(module: nn.Module, _: Any, output: Any) -> None:
            if not listens() or not shape:
                return
            call = calls.get(module, 0)
            calls[module] = call + 1
            i = waiting.get((module, call))
            if i is not None:
                out = first_tensor(output)
                outs[i] = out.clone() if copy else out

        def leave(*_: Any) -> None:
            if not listens():
                return
            index = next(passes)
            found: list[BranchRecord] = []
            for i, branch in enumerate(branches):
                x = xs.pop(i)
                out = branch.turned(outs.pop(i), x)
                flat = x.ndim < len(shape[0])
                found.append(BranchRecord(x, out, shape[0] if flat else x.shape))
            shape.clear()
            if to is None:
                records[index].extend(found)
            else:
                to(index, found)

        module = blocks[indices[0]].module
        handles = [module.register_forward_pre_hook(enter, with_kwargs=True)]
        for i, branch in enumerate(branches):
            handles.append(branch.entry.register_forward_pre_hook(see_x(i), with_kwargs=True))
        for out in {id(b.out): b.out for b in branches}.values():
            handles.append(out.register_forward_hook(see_out))
        handles.append(module.register_forward_hook(leave))
        stack.enter_context(hooked(*handles))

    with ExitStack() as stack:
        for indices in places.values():
            tap(stack, indices)
        yield records
