"""Copies with fewer or more blocks of a model whose blocks are in several lists, or one module."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import nn

from everydepth.errors import UnsupportedModelError
from everydepth.stream.discovery.tail import Tail
from everydepth.stream.edit import (
    BlockList,
    adopted,
    copy_without,
    correct_configs,
    edited,
    fields,
    put,
    settle,
)

Model = TypeVar("Model", bound=nn.Module)


def shortened(
    model: Model,
    blocks: Sequence[nn.Module],
    depth: int,
    tail: Tail,
    *,
    share: bool,
    filled: bool = False,
) -> Model:
    """A copy of `model` with the first `depth` of `blocks`.

    A block that only its list refers to is removed. Any other is replaced by what it computes when
    silent: the identity, or its skip if that changes the shape.

    filled: replace every block, for a model that takes as many from each list as there were.
    """
    lists = _lists(model, blocks)
    if len(set(blocks)) < len(blocks):
        return _recounted(model, lists, blocks, depth, share=share)
    if len(lists) == 1 and (hasattr(model, "config") or all(tail.direct)):
        (held,) = lists.values()
        if list(held) == list(blocks) and not any(number > depth for number in tail.skips):
            return edited(model, held, range(depth), share=share)
    paths = {module: path for path, module in model.named_modules()}
    gone = {block: number for number, block in enumerate(blocks, start=1) if number > depth}
    left = {
        block: number
        for block, number in gone.items()
        if filled or _has_place(model, blocks, number, lists, tail)
    }
    dropped = [block for block, number in gone.items() if number not in tail.skips]
    copied = copy_without(model, dropped, share=share)
    for block, number in left.items():
        skip = tail.skips.get(number)
        own = None if skip is None else _same_place(block, skip, copied.get_submodule(paths[block]))
        copied.set_submodule(paths[block], tail.stand_in(number, own))
    kept = {
        path: [place for place, block in enumerate(held) if block not in gone or block in left]
        for path, held in lists.items()
    }
    counts = [len(held) for held in lists.values()]
    staged = _stages(copied, counts, [len(places) for places in kept.values()])
    empty: list[tuple[str, str]] = []
    for path, places in kept.items():
        new: BlockList = copied.get_submodule(path)  # pyright: ignore[reportAssignmentType]
        olds = list(new)
        del new[:]
        new.extend([olds[place] for place in places])
        holder, _, name = path.rpartition(".")
        if not places and isinstance(copied.get_submodule(holder), nn.ModuleList):
            empty.append((holder, name))
        if not staged:
            correct_configs(copied, path, places, len(olds))
    for holder, name in reversed(empty):  # a list of lists: a model may unpack each
        del copied.get_submodule(holder)[int(name)]  # pyright: ignore[reportIndexIssue]
    return copied


def in_lists_of_lists(model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """Whether blocks are in lists of a list, as pairs are that a model unpacks in its loop."""
    holders = {path.rpartition(".")[0] for path in _lists(model, blocks)}
    return any(path and isinstance(model.get_submodule(path), nn.ModuleList) for path in holders)


def _has_place(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    number: int,
    lists: Mapping[str, BlockList],
    tail: Tail,
) -> bool:
    """Whether the model's forward needs something in the place of a block (from 1).

    It does if the block has its own attribute name, if its skip changes the shape, or if the model
    does something before or after this position in a list, which it may identify by number.
    """
    held = next((list(each) for each in lists.values() if blocks[number - 1] in list(each)), None)
    if held is None or number in tail.skips:
        return True
    if hasattr(model, "config"):  # which says how many there are in a list
        return False
    near = [(number, number - 1), (number - 2, number - 2)]
    return any(
        0 <= other < len(blocks) and blocks[other] in held and not tail.direct[between]
        for other, between in near
    )


def _stages(model: nn.Module, before: list[int], after: list[int]) -> bool:
    """Update the config field that lists the number of blocks per stage; whether there was one."""
    config = getattr(model, "config", None)
    names = [name for name, value in fields(config).items() if value == before]
    for name in names:
        put(config, name, after)
    return bool(names)


def lengthened(
    model: Model,
    blocks: Sequence[nn.Module],
    after: int,
    block: nn.Module,
    like: int,
    *,
    share: bool,
) -> Model:
    """A copy of `model` with `block` after the first `after` blocks, in the list of `like`."""
    lists = _lists(model, blocks)
    if len(set(blocks)) < len(blocks):
        raise UnsupportedModelError(
            f"{type(model).__name__} calls one module at several depths, so no block can be "
            "inserted between them"
        )
    pattern = blocks[like - 1]
    path, held = next(((p, h) for p, h in lists.items() if pattern in list(h)), ("", None))
    if held is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has its blocks as attributes rather than in a list, so no "
            "block can be inserted between them"
        )
    place = list(held).index(blocks[like - 1]) + (like <= after)
    copied = copy_without(model, (), share=share)
    new: BlockList = copied.get_submodule(path)  # pyright: ignore[reportAssignmentType]
    together = list(new)
    block = adopted(block, model, copied).train(held.training)
    together.insert(place, block)
    del new[:]
    new.extend(together)
    counts = [len(each) for each in lists.values()]
    more = [len(each) + (each is held) for each in lists.values()]
    if not _stages(copied, counts, more):
        order = list(range(len(held)))
        order.insert(place, list(held).index(blocks[like - 1]))
        correct_configs(copied, path, order, len(held))
    if not share:
        settle(model, copied, [block], len(blocks))
    return copied


def listed(
    model: Model,
    blocks: Sequence[nn.Module],
    after: int,
    block: nn.Module,
    like: int,
    tail: Tail,
    *,
    share: bool,
) -> Model:
    """`lengthened` for lists of a list that the model unpacks: one more, silent but for `block`."""
    path = next(path for path, held in _lists(model, blocks).items() if blocks[like - 1] in held)
    numbers = {each: number for number, each in enumerate(blocks, start=1)}
    holder, _, name = path.rpartition(".")
    inside = [numbers.get(each, 0) for each in model.get_submodule(path).children()]
    if 0 in inside or after not in (inside[0] - 1, inside[-1]):
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot run a block more after depth {after}: it takes its "
            f"blocks from lists of {len(inside)}, and runs each as a whole; "
            + ("write an adapter" if 0 in inside else f"insert after={inside[-1]}")
        )
    copied = copy_without(model, (), share=share)
    block = adopted(block, model, copied).train(blocks[like - 1].training)
    more = [block if number == like else tail.stand_in(number, None) for number in inside]
    outer: nn.ModuleList = copied.get_submodule(holder)  # pyright: ignore[reportAssignmentType]
    outer.insert(int(name) + (after == inside[-1]), nn.ModuleList(more))
    return copied


def _same_place(block: nn.Module, part: nn.Module, copied: nn.Module) -> nn.Module:
    """The submodule of a copied block, or the module made of some, that `part` is of the block."""
    # What deepcopy finds in its memo it does not copy.
    twins = zip(block.modules(), copied.modules(), strict=True)
    return copy.deepcopy(part, {id(own): twin for own, twin in twins})


def _recounted(
    model: Model,
    lists: Mapping[str, BlockList],
    blocks: Sequence[nn.Module],
    depth: int,
    *,
    share: bool,
) -> Model:
    """A copy of a model that calls one module repeatedly, with another count: in its config, or
    without one in the attribute of the module that calls it."""
    copied = copy_without(model, (), share=share)
    path, before = next(iter(lists), None), len(blocks)
    if path is not None and correct_configs(copied, path, range(depth), before):
        return copied
    counts = [
        (there, name)
        for here, there in zip(model.modules(), copied.modules(), strict=True)
        if blocks[0] in set(here.modules()) - {here}
        for name, value in vars(here).items()
        if type(value) is int and value == before
    ]
    if hasattr(model, "config") or len(counts) != 1:
        what = "field of its config" if hasattr(model, "config") else "field of its own"
        raise UnsupportedModelError(
            f"{type(model).__name__} calls one module {before} times, but no {what} sets this "
            "number, so it cannot be cut"
        )
    setattr(*counts[0], depth)
    return copied


def _lists(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, BlockList]:
    """The module lists that hold the blocks, by path, in order."""
    wanted = set(blocks)
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, BlockList) and any(child in wanted for child in module.children())
    }
