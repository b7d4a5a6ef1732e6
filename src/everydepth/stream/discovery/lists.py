"""Copies with fewer or more blocks of a model whose blocks lie in several lists, or are one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import nn

from everydepth.errors import UnsupportedModelError
from everydepth.stream.edit import (
    BlockList,
    adopted,
    copy_without,
    correct_configs,
    edited,
    settle,
)

Model = TypeVar("Model", bound=nn.Module)


def shortened(
    model: Model,
    blocks: Sequence[nn.Module],
    depth: int,
    skips: Mapping[int, nn.Module],
    *,
    share: bool,
) -> Model:
    """A copy of `model` with the first `depth` of `blocks`.

    skips: block (from 1) -> the module on its skip, where that changes the shape. It takes the
        place of a block that goes, as a silent block is no more than its skip.
    """
    lists = _lists(model, blocks)
    if len(set(blocks)) < len(blocks):
        return _recounted(model, lists, len(blocks), depth, share=share)
    if len(lists) == 1:
        ((path, held),) = lists.items()
        if list(held) == list(blocks):
            return edited(model, held, range(depth), share=share)
    gone = {block: number for number, block in enumerate(blocks, start=1) if number > depth}
    dropped = [block for block, number in gone.items() if number not in skips]
    copied = copy_without(model, dropped, share=share)
    counts = [len(held) for held in lists.values()]
    left = [sum(b not in gone or gone[b] in skips for b in held) for held in lists.values()]
    staged = _stages(copied, counts, left)
    for path, held in lists.items():
        kept = [
            place for place, block in enumerate(held) if block not in gone or gone[block] in skips
        ]
        new: BlockList = copied.get_submodule(path)  # pyright: ignore[reportAssignmentType]
        olds = list(new)
        del new[:]
        for place in kept:
            number = gone.get(held[place])
            old = olds[place]
            new.append(old if number is None else _same_place(held[place], skips[number], old))
        if not staged:
            correct_configs(copied, path, kept, len(held))
    return copied


def _stages(model: nn.Module, before: list[int], after: list[int]) -> bool:
    """Correct the field of a config that lists how many blocks each stage has."""
    config = getattr(model, "config", None)
    fields = {} if config is None else vars(config)
    names = [name for name, value in fields.items() if value == before]
    for name in names:
        setattr(config, name, after)
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
    """A copy of `model` with `block` behind the first `after` blocks, in the list of `like`."""
    lists = _lists(model, blocks)
    if len(set(blocks)) < len(blocks):
        raise UnsupportedModelError(
            f"{type(model).__name__} calls one module at several depths, so a new block cannot be "
            "put between them"
        )
    path, held = next((p, each) for p, each in lists.items() if blocks[like - 1] in list(each))
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


def _same_place(block: nn.Module, part: nn.Module, copied: nn.Module) -> nn.Module:
    """The part of a copied block that `part` is of the block itself."""
    path = next(name for name, module in block.named_modules() if module is part)
    return copied.get_submodule(path)


def _recounted(
    model: Model, lists: Mapping[str, BlockList], before: int, depth: int, *, share: bool
) -> Model:
    """One module called again and again: only the count changes, and it must be in a config."""
    copied = copy_without(model, (), share=share)
    (path, *_) = lists
    if not correct_configs(copied, path, range(depth), before):
        raise UnsupportedModelError(
            f"{type(model).__name__} calls one module {before} times, and no number in its config "
            "says so, so it cannot be cut"
        )
    return copied


def _lists(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, BlockList]:
    """The module lists that hold the blocks, by path, in order."""
    wanted = set(blocks)
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, BlockList) and any(child in wanted for child in module.children())
    }
