"""Copies of a model with fewer, more or other blocks, and matching configs."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn

from everydepth.errors import FOREIGN, SettingError, UnsupportedModelError
from everydepth.stream.wrapping import check_copied, fetch, without_adapters

Model = TypeVar("Model", bound=nn.Module)
BlockList = nn.ModuleList | nn.Sequential

_NO_BLOCKS: Mapping[int, nn.Module] = MappingProxyType({})
# Config fields that may count blocks.
_COUNTS = re.compile("layer|block|depth")
# What a model class may raise if built from a config alone.
_UNBUILDABLE = (ImportError, *FOREIGN)
# Attributes of modules that hold the index of their block.
_PLACES = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx")


def edited(
    model: Model,
    blocks: BlockList,
    order: Sequence[int],
    *,
    share: bool,
    new: Mapping[int, nn.Module] = _NO_BLOCKS,
) -> Model:
    """A copy of `model` with the blocks of `order` in place of `blocks`, and updated configs.

    order: for each place, the index of the old block that goes there. Truncations, insertions and
        selections are all expressed this way.
    share: use the model's own tensors instead of copies. Such a copy is not meant to be saved, so
        its config is not verified by building a model from it.
    new: new blocks by place (from 0); `order` then names the old block whose entry they get in the
        config's per-layer lists.
    """
    path = _path(model, blocks)
    stay = [old for place, old in enumerate(order) if place not in new]
    _check_order(model, order, stay, len(blocks))
    dropped = [block for old, block in enumerate(blocks) if old not in stay]
    copied = copy_without(model, dropped, share=share)
    correct_configs(copied, path, order, len(blocks))
    _part_by_block(copied, path, order, len(blocks))
    added = {place: adopted(block, model, copied) for place, block in new.items()}
    kept: BlockList = copied.get_submodule(path)  # pyright: ignore[reportAssignmentType]
    olds = list(kept)
    # Refilled rather than replaced, because the list may be a subclass.
    del kept[:]
    for place, old in enumerate(order):
        block = added.get(place, olds[old])
        move(block, place - old)
        kept.append(block)
    if not share:
        settle(model, copied, added.values(), len(blocks))
        _check_config(model, copied, path, order)
    return copied


def shortened(model: Model, blocks: BlockList, depth: int, *, share: bool) -> Model:
    """A copy of `model` with the first `depth` of its `blocks`."""
    return edited(model, blocks, range(depth), share=share)


def lengthened(
    model: Model, blocks: BlockList, after: int, block: nn.Module, like: int, *, share: bool
) -> Model:
    """A copy of `model` with `block` after the first `after` of its `blocks`.

    like: the block (from 1) of the same kind as the new one.
    """
    order = [*range(after), like - 1, *range(after, len(blocks))]
    return edited(model, blocks, order, share=share, new={after: block})


def copy_without(model: Model, dropped: Iterable[nn.Module], *, share: bool) -> Model:
    """A copy of `model` that leaves out the tensors of `dropped` modules.

    The dropped modules remain in place, with the original tensors, for the caller to remove.
    share: copy no tensors at all, so that both models have the same parameters and buffers.
    """
    check_copied(model)
    dropped = set(dropped)
    stay = _outside(model, dropped)
    left = {id(module) for root in dropped for module in root.modules() if module not in stay}
    kept = {
        id(tensor)
        for module in model.modules()
        if id(module) not in left
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }
    # deepcopy does not copy what is in its memo.
    tensors = (*model.parameters(), *model.buffers())
    memo = {id(tensor): tensor for tensor in tensors if share or id(tensor) not in kept}
    copied = copy.deepcopy(model, memo)
    if not share:
        fetch(model, copied, left)
    return copied


def _outside(model: nn.Module, dropped: set[nn.Module]) -> set[nn.Module]:
    """The modules that the model reaches other than through `dropped` ones."""
    found: set[nn.Module] = set()
    todo = [model]
    while todo:
        module = todo.pop()
        if module not in found and module not in dropped:
            found.add(module)
            todo.extend(module.children())
    return found


def block_copy(block: nn.Module) -> nn.Module:
    """A copy of a block with its own plain tensors and the original's config objects."""
    configs = [vars(module).get("config") for module in block.modules()]
    known = {id(config): config for config in configs if config is not None}
    copied = copy.deepcopy(block, known)
    fetch(block, copied, ())
    return without_adapters(copied)


def adopted(block: nn.Module, model: nn.Module, copied: nn.Module) -> nn.Module:
    """Make `block`, which was made from `model`, refer to the configs of its copy `copied`."""
    configs = {
        id(getattr(old, "config", None)): getattr(new, "config", None)
        for old, new in zip(model.modules(), copied.modules(), strict=True)
    }
    for module in block.modules():
        config = vars(module).get("config")
        if config is not None and id(config) in configs:
            vars(module)["config"] = configs[id(config)]
    return block


def name_stages(config: Any, count: int) -> None:
    """Set the names that a backbone config derives from its number of stages."""
    config.stage_names = ["stem", *(f"stage{number}" for number in range(1, count + 1))]
    config.set_output_features_output_indices(out_features=None, out_indices=None)


def _path(model: nn.Module, blocks: BlockList) -> str:
    for name, module in model.named_modules():
        if module is blocks and name:
            return name
    raise UnsupportedModelError(
        f"these blocks are not a module list of {type(model).__name__}; pass its own list"
    )


def _check_order(model: nn.Module, order: Sequence[int], stay: list[int], count: int) -> None:
    wrong = [old for old in order if not 0 <= old < count]
    if wrong or not order or len(set(stay)) < len(stay):
        raise SettingError(
            f"blocks {list(order)}, but {type(model).__name__} has {count}; use numbers from 0 to "
            f"{count - 1}, at least one, each at most once"
        )


def move(block: nn.Module, by: int) -> None:
    """Shift the block index stored in a block's modules, which caches and masks depend on."""
    for module in block.modules():
        for name in _PLACES:
            place = vars(module).get(name)
            if isinstance(place, int) and by:
                vars(module)[name] = place + by


# -- configs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Count:
    """A config field that may count the blocks.

    route: attribute names from the holder's config to the one with the field.
    index: the stage, if the field is a list of counts per stage.
    """

    route: tuple[str, ...]
    name: str
    index: int | None = None

    def set(self, config: Any, order: Sequence[int], before: int, others: set[str]) -> None:
        """Set it to the new number of blocks, and update the config's per-block lists.

        others: words in the names of fields that count other blocks; lists with such a word in
            their names belong to those.
        """
        for name in self.route:
            config = getattr(config, name)
        try:
            if self.index is not None:
                counts = list(fields(config)[self.name])
                counts[self.index] = len(order)
                put(config, self.name, counts)
                return
            put(config, self.name, len(order))
            for key, value in list(fields(config).items()):
                per_block = isinstance(value, (list, tuple)) and len(value) == before
                if per_block and _COUNTS.search(key) and not others & set(key.split("_")):
                    put(config, key, type(value)([value[old] for old in order]))
        except AttributeError as error:
            raise UnsupportedModelError(
                f"{self.name} of {type(config).__name__} cannot be set to {len(order)} "
                f"({error}); give the model a config whose fields can be set"
            ) from error
        if len(getattr(config, "stage_names", None) or ()) == before + 1:
            name_stages(config, len(order))


# Which of several candidate fields counts a list: (class, path of the list, candidates) -> field.
_known: dict[tuple[type[nn.Module], str, tuple[_Count, ...]], _Count] = {}


def correct_configs(model: nn.Module, path: str, order: Sequence[int], before: int) -> bool:
    """Update the fields that count these blocks, in every config on the path to them.

    Returns whether there was such a field.
    """
    corrected = False
    seen: set[int] = set()
    names = path.split(".")
    for level in range(len(names)):
        holder = model.get_submodule(".".join(names[:level]))
        config = getattr(holder, "config", None)
        if config is None or id(config) in seen:
            continue
        seen |= {id(found) for _, found in _tree(config)}
        below = [model.get_submodule(".".join(names[:i])) for i in range(level, len(names))]
        corrected |= _correct(holder, ".".join(names[level:]), below, order, before)
    return corrected


def _correct(
    holder: nn.Module, path: str, below: list[nn.Module], order: Sequence[int], before: int
) -> bool:
    tree = list(_tree(holder.config))
    near = [getattr(module, "config", None) for module in reversed(below)]
    # The innermost config on the path to the list first; if it has no such field, all others.
    ranked = [pair for config in near for pair in tree if pair[1] is config]
    for group in (*([pair] for pair in ranked), tree):
        counts = tuple(count for pair in group for count in _counts(*pair, before))
        if counts:
            count = counts[0] if len(counts) == 1 else _counting(holder, path, counts)
            others = {word for other in counts for word in other.name.split("_")}
            count.set(holder.config, order, before, others - set(count.name.split("_")))
            return True
    return False


def _counts(route: tuple[str, ...], config: Any, before: int) -> Iterator[_Count]:
    """The fields of one config that might count `before` blocks."""
    for name, value in fields(config).items():
        if _COUNTS.search(name) and type(value) is int and value == before:
            yield _Count(route, name)
        elif _COUNTS.search(name) and isinstance(value, (list, tuple)):
            for index, number in enumerate(value):
                if type(number) is int and number == before:
                    yield _Count(route, name, index)


def _counting(holder: nn.Module, path: str, counts: tuple[_Count, ...]) -> _Count:
    """Which of several equal fields counts the list: the one that changes it in a built model."""
    key = (type(holder), path, counts)
    if key not in _known:
        before = _length(holder, path)
        assert before is not None
        for count in counts:
            config = copy.deepcopy(holder.config)
            count.set(config, [*range(before), before - 1], before, set())
            built = _built(type(holder), config)
            if built is not None and _length(built, path) == before + 1:
                _known[key] = count
                break
        else:
            names = [count.name for count in counts]
            raise UnsupportedModelError(
                f"{type(holder.config).__name__} has {before} in {' and '.join(names)}, and "
                f"building a model from it does not show which one counts {path!r}; write an "
                "adapter with `truncated` and `inserted` (docs/add-an-architecture.md)"
            )
    return _known[key]


# Config fields for widths that consist of one part per block.
_PARTS = re.compile("per_(layer|block)")


def _part_by_block(model: nn.Module, path: str, order: Sequence[int], before: int) -> None:
    """Select the parts of tensors outside the blocks that have one part per block.

    A model built from the updated config shows which tensors these are: their sizes differ.
    """
    tree = _tree(getattr(model, "config", None))
    if not any(_PARTS.search(name) and value for _, c in tree for name, value in fields(c).items()):
        return
    built = _rebuilt(model)
    wanted = {} if built is None else dict(built.named_parameters())
    for name, parameter in list(model.named_parameters()):
        new = wanted.get(name)
        if name.startswith(f"{path}.") or new is None or new.shape == parameter.shape:
            continue
        sizes = enumerate(zip(parameter.shape, new.shape, strict=True))
        changed = [axis for axis, (old, now) in sizes if old != now]
        if len(changed) == 1 and parameter.shape[changed[0]] * len(order) == (
            new.shape[changed[0]] * before
        ):
            _take_parts(model, name, changed[0], order, before)


def _take_parts(model: nn.Module, name: str, axis: int, order: Sequence[int], before: int) -> None:
    holder, _, own = name.rpartition(".")
    module = model.get_submodule(holder)
    parameter = module.get_parameter(own)
    apart = parameter.detach().unflatten(axis, (before, -1))
    rows = torch.tensor(list(order), device=parameter.device)
    kept = apart.index_select(axis, rows).flatten(axis, axis + 1)
    for key, value in vars(module).items():
        if type(value) is int and value == parameter.shape[axis]:
            vars(module)[key] = kept.shape[axis]
    setattr(module, own, nn.Parameter(kept, requires_grad=parameter.requires_grad))


def fields(config: Any) -> Mapping[str, Any]:
    """The fields of a config, which is an object or a dictionary."""
    return config if isinstance(config, dict) else getattr(config, "__dict__", {})


def put(config: Any, name: str, value: Any) -> None:
    """Set a field of a config."""
    if isinstance(config, dict):
        config[name] = value
    else:
        setattr(config, name, value)


def _tree(config: Any, route: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A config and its nested configs, each with its route (see `_Count`)."""
    yield route, config
    for name, value in fields(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "__dict__"):
            yield from _tree(value, (*route, name))


def _built(cls: type[nn.Module], config: Any) -> nn.Module | None:
    """A model on the meta device; None if the class cannot be built from a config alone."""
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return cls(config)
    except _UNBUILDABLE:
        return None


def _rebuilt(model: nn.Module) -> nn.Module | None:
    """A model on the meta device built from another's config; None if there is no way to."""
    config = getattr(model, "config", None)
    return None if config is None else _built(type(model), copy.deepcopy(config))


def _length(model: nn.Module, path: str) -> int | None:
    try:
        return len(model.get_submodule(path))  # pyright: ignore[reportArgumentType]
    except (AttributeError, TypeError):
        return None


def _check_config(model: nn.Module, copied: nn.Module, path: str, order: Sequence[int]) -> None:
    """Raise if a model built from the new config would have other blocks than the edited one."""
    config: Any = getattr(copied, "config", None)
    if hasattr(config, "from_dict"):
        from huggingface_hub.errors import StrictDataclassError

        try:
            config.from_dict(config.to_dict())
        except (StrictDataclassError, *_UNBUILDABLE) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise UnsupportedModelError(
                f"{type(config).__name__} cannot describe {type(model).__name__} with blocks "
                f"{[old + 1 for old in order]}: {reason}; use another depth"
            ) from error
    built = _rebuilt(copied)
    if built is None or _length(built, path) is None:
        return
    wanted, found = _kinds(copied, path), _kinds(built, path)
    differ = [place for place, kind in enumerate(wanted) if [kind] != found[place : place + 1]]
    if len(found) == len(wanted) and not differ:
        return
    # Blocks that were changed after building already differed from the config before the edit.
    original = _rebuilt(model)
    before = [] if original is None else _kinds(original, path)
    old = _kinds(model, path)
    if len(found) == len(wanted) and all(before[order[p]] != old[order[p]] for p in differ):
        return
    what = (
        f"{len(found)} blocks in {path!r}"
        if len(found) != len(wanted)
        else f"a different block {differ[0] + 1} in {path!r}"
    )
    raise UnsupportedModelError(
        f"{type(config).__name__} cannot describe {type(model).__name__} with blocks "
        f"{[old + 1 for old in order]}: a model built from it has {what}, so saving and loading "
        "would change it; use another depth, or run the full model at a depth instead "
        "(predict, generate and observe need no cut model)"
    )


def settle(model: nn.Module, copied: nn.Module, new: Iterable[nn.Module], last: int) -> None:
    """Update the numbers that a class derives from the position or number of its blocks.

    Drop-path rates, and all numbers of a new block, become those of a model built from the config:
    the former act in training only, and the block is silent. Raise if any other number of an old
    block would change.

    last: the number of blocks before.
    """
    inside = {module for block in new for module in block.modules()}
    if not inside:
        return
    before, after = _rebuilt(model), _rebuilt(copied)
    if before is None or after is None or _numbers(before) != _numbers(model):
        return
    twins = dict(after.named_modules())
    for name, module in list(copied.named_modules()):
        twin = twins.get(name)
        if twin is not None and (hasattr(module, "drop_prob") or hasattr(twin, "drop_prob")):
            holder, _, own = name.rpartition(".")
            kept = copy.deepcopy(twin).train(module.training)
            setattr(copied.get_submodule(holder), own, kept)
    names = dict(copied.named_modules())
    own = {(n, k): v for (n, k), v in _numbers(copied).items() if names[n] not in inside}
    after = _described(copied, own, after)
    wanted = _numbers(after)
    for (name, key), value in wanted.items():
        if name in names and names[name] in inside and key in vars(names[name]):
            vars(names[name])[key] = value
    wrong = next((k for k, v in own.items() if not _close(wanted.get(k, v), v)), None)
    if wrong is not None:
        raise UnsupportedModelError(
            f"{type(copied).__name__} computes {'.'.join(wrong)} from the position or number of "
            f"its blocks, so another block would change it ({own[wrong]:g} would become "
            f"{wanted[wrong]:g} after saving and loading); if it is the position, insert "
            f"after={last}"
        )


def _described(
    model: nn.Module, own: Mapping[tuple[str, str], float], built: nn.Module
) -> nn.Module:
    """A model built from the config, which is changed so that the blocks keep their numbers.

    Some classes divide a scale from the config by the root of the number of blocks: with one more
    block, the scale must be larger. Trying each field shows which one it is.
    """
    told = _numbers(built)
    ratios = [v / told[k] for k, v in own.items() if told.get(k) and not _close(told[k], v)]
    if not ratios or not _close(min(ratios), max(ratios)):
        return built
    for _, config in _tree(model.config):
        for name, value in list(fields(config).items()):
            if type(value) is not float or value == 0.0:
                continue
            put(config, name, value * ratios[0])
            other = _rebuilt(model)
            told = {} if other is None else _numbers(other)
            if other is not None and all(_close(told.get(k, v), v) for k, v in own.items()):
                return other
            put(config, name, value)
    return built


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-12)


def _floats(module: nn.Module) -> list[str]:
    return [key for key, value in vars(module).items() if type(value) is float]


def _numbers(model: nn.Module) -> dict[tuple[str, str], float]:
    """The float attributes of all modules, by module and name."""
    return {
        (name, key): vars(module)[key]
        for name, module in model.named_modules()
        for key in _floats(module)
    }


def described(model: nn.Module) -> bool:
    """Whether the config describes the model: one built from it has the same tensors."""
    built = _rebuilt(model)
    return built is None or shapes(built) == shapes(model)


def shapes(module: nn.Module) -> dict[str, torch.Size]:
    """The shapes of a module's tensors, by name."""
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


def _kinds(model: nn.Module, path: str) -> list[set[tuple[Any, ...]]]:
    """What distinguishes blocks: shapes of tensors and plain attributes of modules."""
    return [
        {
            *((name, tuple(tensor.shape)) for name, tensor in block.state_dict().items()),
            *(
                (name, key, value)
                for name, module in block.named_modules()
                for key, value in vars(module).items()
                if type(value) in (int, str, bool)
                and key not in _PLACES
                and key != "training"
                and not key.startswith("_")
            ),
        }
        for block in model.get_submodule(path)  # pyright: ignore[reportGeneralTypeIssues]
    ]
