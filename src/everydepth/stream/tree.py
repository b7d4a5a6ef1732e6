"""A stream as text: its blocks, their residual connections and its readout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from torch import nn

from everydepth.stream.block import Block, Branch, Scale

if TYPE_CHECKING:
    from everydepth.stream.contract import ResidualStream


def tree(stream: ResidualStream) -> str:
    """One line per kind of block and per branch, then what is known about the readout."""
    kinds = ", ".join(dict.fromkeys(type(block.module).__name__ for block in stream.blocks))
    one = stream.depth > 1 and len({id(block.module) for block in stream.blocks}) == 1
    again = ", one module called repeatedly" if one else ""
    count = f"{stream.depth} block{'' if stream.depth == 1 else 's'} ({kinds}{again})"
    lines = [f"{stream.name}: {count}, task {stream.task}"]
    alike: dict[tuple[str, ...], list[int]] = {}
    for number, block in enumerate(stream.blocks, start=1):
        alike.setdefault(_described(block), []).append(number)
    for text, numbers in alike.items():
        word = "block" if len(numbers) == 1 else "blocks"
        lines += [f"  {word} {spans(numbers)}: {text[0]}", *(f"    {line}" for line in text[1:])]
    account = dict(stream.account())
    account.setdefault("readout", f"{type(stream.head).__name__} after the norm")
    return "\n".join([*lines, *(f"  {name}: {text}" for name, text in account.items())])


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers in short form: 1, 3-5, 9."""
    groups = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _described(block: Block) -> tuple[str, ...]:
    names = {id(module): name for name, module in block.module.named_modules()}
    how = ", parallel branches" if block.parallel else ""
    how += ", added to the state by the model itself" if block.outside else ""
    if not block.branches:
        return (f"{type(block.module).__name__}, residual connections unknown",)
    lines = [_branch(branch, names) for branch in block.branches]
    return (f"{type(block.module).__name__}{how}", *lines)


def _branch(branch: Branch, names: dict[int, str]) -> str:
    def name(module: nn.Module) -> str:
        return names.get(id(module)) or type(module).__name__

    entry, out = name(branch.entry), name(branch.out)
    inside = out if entry == out else f"{entry} ... {out}"
    skip = "x" if branch.skip is None else _applied(branch.skip, names, name)
    total = f"{_factor(branch.weight)}{skip} + {_factor(branch.scale)}[{inside}]"
    post = "" if branch.post is None else f", then {name(branch.post)}"
    return f"{branch.kind}: {total}{post}; last map {_last(branch, name)}"


def _applied(skip: nn.Module, names: dict[int, str], name: Callable[[nn.Module], str]) -> str:
    """What is done to the state on a skip: by one module, or by several of the block's own."""
    made = id(skip) not in names and isinstance(skip, nn.Sequential)
    text = "x"
    for step in skip.children() if made else (skip,):
        factor = getattr(step, "factor", None) if id(step) not in names else None
        text = f"{name(step)}({text})" if factor is None else f"{_factor(factor)}{text}"
    return text


def _last(branch: Branch, name: Callable[[nn.Module], str]) -> str:
    more = f" and {len(branch.others)} more" if branch.others else ""
    return f"{name(branch.proj)}{more}"


def _factor(value: Scale) -> str:
    if not isinstance(value, float):
        return "scale * "
    return "" if value == 1.0 else f"{value:g} * "
