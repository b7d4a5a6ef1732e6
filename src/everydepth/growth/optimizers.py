"""Carry an optimizer over to a grown model: the state of old parameters is kept bit for bit."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from everydepth.config import checked
from everydepth.errors import SettingError
from everydepth.stream import ResidualStream, unwrapped
from everydepth.stream.modes import requiring
from everydepth.training.optimizers import check_own


def counterparts(old: ResidualStream, new: ResidualStream, after: int) -> dict[str, str]:
    """Each parameter name in the old model, and its name in the grown one."""
    before, now = unwrapped(old.model), unwrapped(new.model)
    paths = [{id(m): name for name, m in model.named_modules()} for model in (before, now)]
    moved: list[tuple[str, str]] = []
    if len(new.blocks) != len(old.blocks) + 1 or not 0 <= after <= len(old.blocks):
        raise SettingError(
            f"{old.name} has {len(old.blocks)} blocks, the grown {new.name} {len(new.blocks)}, and "
            f"after={after}; pass the model, what `insert(model, after={after})` made of it, and "
            "the same `after`"
        )
    for index, block in enumerate(old.blocks):
        there = new.blocks[index if index < after else index + 1]
        moved.append((f"{paths[0][id(block.module)]}.", f"{paths[1][id(there.module)]}."))
    names: dict[str, str] = {}
    for name, _ in before.named_parameters():
        start, end = next(((a, b) for a, b in moved if name.startswith(a)), ("", ""))
        names[name] = end + name[len(start) :]
    return names


@checked
def carried(
    optimizer: Optimizer, old: ResidualStream, new: ResidualStream, after: int
) -> Optimizer:
    """An optimizer of the same class and settings for the grown model.

    Old parameters stay in their groups and keep their state (momentum, second moments, step
    counts). The new block's parameters join the group of the first block, without state.

    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> big = ed.insert(model, after=3)
    >>> new = ed.growth.carried(optimizer, ed.as_stream(model), ed.as_stream(big), after=3)
    >>> len(new.param_groups[0]["params"]) > len(optimizer.param_groups[0]["params"])
    True
    """
    check_own(optimizer, unwrapped(old.model))
    names = {id(p): name for name, p in unwrapped(old.model).named_parameters()}
    there = dict(unwrapped(new.model).named_parameters())
    moved = counterparts(old, new, after)
    twins: dict[int, Tensor] = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        twins[id(parameter)] = there[moved[names[id(parameter)]]]
    groups = _groups(optimizer, twins)
    have = {id(p) for group in groups for p in group["params"]}
    fresh = [p for p in new.blocks[after].module.parameters() if id(p) not in have]
    _group_of_first_block(groups, new, after)["params"] += fresh
    return _rebuilt(optimizer, groups, twins)


def twin(optimizer: Optimizer, model: nn.Module, copied: nn.Module) -> Optimizer:
    """The same optimizer for a copy of the model."""
    check_own(optimizer, model)
    pairs = zip(model.parameters(), copied.parameters(), strict=True)
    twins: dict[int, Tensor] = {id(a): b for a, b in pairs}
    return _rebuilt(optimizer, _groups(optimizer, twins), twins)


def _groups(optimizer: Optimizer, twins: Mapping[int, Tensor]) -> list[dict[str, Any]]:
    return [{**g, "params": [twins[id(p)] for p in g["params"]]} for g in optimizer.param_groups]


def _rebuilt(
    optimizer: Optimizer, groups: list[dict[str, Any]], twins: Mapping[int, Tensor]
) -> Optimizer:
    """An optimizer of the same class and settings over `groups`, with the state of the twins."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    made = type(optimizer)(groups, **settings)
    for parameter, state in optimizer.state.items():
        made.state[twins[id(parameter)]] = copy.deepcopy(state)
    return made


def _group_of_first_block(
    groups: list[dict[str, Any]], new: ResidualStream, after: int
) -> dict[str, Any]:
    neighbor = {id(p) for p in new.blocks[0 if after else 1].module.parameters()}
    for group in groups:
        if any(id(p) in neighbor for p in group["params"]):
            return group
    return groups[0]


@contextmanager
def frozen_except(
    model: nn.Module, parameters: Iterable[Tensor] | None
) -> Generator[None, None, None]:
    """Train only these parameters (None: all) inside the context."""
    kept = {id(p) for p in (model.parameters() if parameters is None else parameters)}
    frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in kept]
    with requiring(frozen, False):
        yield
