"""A deeper copy of a model: the same class, one more block."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn

from everydepth.errors import UnsupportedModelError
from everydepth.stream.truncate import copy_without

Model = TypeVar("Model", bound=nn.Module)


def adopted(block: nn.Module, model: nn.Module, copied: nn.Module) -> nn.Module:
    """`block`, made from a part of `model`, as a part of its copy: it reads the copy's configs."""
    configs = {
        id(getattr(old, "config", None)): getattr(new, "config", None)
        for old, new in zip(model.modules(), copied.modules(), strict=True)
    }
    for module in block.modules():
        config = vars(module).get("config")
        if config is not None and id(config) in configs:
            vars(module)["config"] = configs[id(config)]
    return block


def block_copy(block: nn.Module) -> nn.Module:
    """A copy of a block with tensors of its own and the configs of the original."""
    configs = [vars(module).get("config") for module in block.modules()]
    return copy.deepcopy(block, {id(config): config for config in configs if config is not None})


def lengthened(
    model: Model,
    blocks: nn.ModuleList | nn.Sequential,
    after: int,
    block: nn.Module,
    like: int,
    *,
    share: bool,
    count: str = "num_hidden_layers",
) -> Model:
    """Copy `model` with `block` put behind the first `after` of `blocks`, its configs corrected.

    like: the block (from 1) whose entry in the config's per-layer lists the new one gets.
    count: the name under which configs keep the number of these blocks.
    """
    path = next((name for name, module in model.named_modules() if module is blocks), None)
    if path is None:
        raise UnsupportedModelError(
            f"these blocks are not part of {type(model).__name__}; pass its own module list"
        )
    copied = copy_without(model, (), share=share)
    block = adopted(block, model, copied)
    parents = path.split(".")
    holders = [copied.get_submodule(".".join(parents[:i])) for i in range(len(parents))]
    for config in {id(c): c for c in (getattr(h, "config", None) for h in holders)}.values():
        if getattr(config, count, None) == len(blocks):
            setattr(config, count, len(blocks) + 1)
            _lengthen_lists(config, len(blocks), after, like)
            if len(getattr(config, "stage_names", None) or ()) == len(blocks) + 1:
                name_stages(config, len(blocks) + 1)
    together: list[nn.Module] = list(copied.get_submodule(path))  # pyright: ignore[reportArgumentType]
    together.insert(after, block)
    kept = (
        nn.Sequential(*together) if isinstance(blocks, nn.Sequential) else nn.ModuleList(together)
    )
    kept.training = blocks.training
    setattr(holders[-1], parents[-1], kept)
    renumber(together)
    return copied


def renumber(blocks: list[nn.Module]) -> None:
    """Tell the modules of each block its place: caches and masks are kept by it."""
    for index, block in enumerate(blocks):
        for module in block.modules():
            if isinstance(vars(module).get("layer_idx"), int):
                vars(module)["layer_idx"] = index


def name_stages(config: Any, count: int) -> None:
    """The names a backbone config derives from its number of stages (the stem is first)."""
    config.stage_names = ["stem", *(f"stage{number}" for number in range(1, count + 1))]
    config.set_output_features_output_indices(out_features=None, out_indices=None)


def _lengthen_lists(config: Any, before: int, after: int, like: int) -> None:
    """Give the config's per-layer lists (`layer_types` and its kin) an entry for the new block."""
    for name, value in vars(config).items():
        if "layer" in name and isinstance(value, (list, tuple)) and len(value) == before:
            setattr(config, name, type(value)([*value[:after], value[like - 1], *value[after:]]))
