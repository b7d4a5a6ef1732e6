"""A shallower copy of a model: the same class, fewer blocks."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

from everydepth.errors import UnsupportedModelError

Model = TypeVar("Model", bound=nn.Module)


def copy_without(model: Model, dropped: Iterable[nn.Module], *, share: bool) -> Model:
    """A copy of `model` in which the tensors of `dropped` modules are not copied.

    share: no tensor is copied, so both models have the same parameters and buffers. The dropped
    modules are still in place: the caller takes them out.
    """
    left = {id(module) for root in dropped for module in root.modules()}
    kept = {
        id(tensor)
        for module in model.modules()
        if id(module) not in left
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }
    # What deepcopy finds in its memo it does not copy.
    tensors = (*model.parameters(), *model.buffers())
    memo = {id(tensor): tensor for tensor in tensors if share or id(tensor) not in kept}
    return copy.deepcopy(model, memo)


def shortened(
    model: Model,
    blocks: nn.ModuleList | nn.Sequential,
    depth: int,
    *,
    share: bool,
    count: str = "num_hidden_layers",
) -> Model:
    """Copy `model` with the first `depth` of `blocks`, its configs corrected.

    count: the name under which configs keep the number of these blocks.
    """
    path = next((name for name, module in model.named_modules() if module is blocks), None)
    if path is None:
        raise UnsupportedModelError(
            f"these blocks are not part of {type(model).__name__}; pass its own module list"
        )
    copied = copy_without(model, list(blocks)[depth:], share=share)
    parents = path.split(".")
    holders = [copied.get_submodule(".".join(parents[:i])) for i in range(len(parents))]
    for config in {id(c): c for c in (getattr(h, "config", None) for h in holders)}.values():
        if getattr(config, count, None) == len(blocks):
            setattr(config, count, depth)
            _shorten_lists(config, len(blocks), depth)
            if len(getattr(config, "stage_names", None) or ()) == len(blocks) + 1:
                keep_stages(config, depth)
    setattr(holders[-1], parents[-1], copied.get_submodule(path)[:depth])  # pyright: ignore[reportIndexIssue]
    return copied


def keep_stages(config: Any, count: int) -> None:
    """Correct the names a backbone config derives from its number of stages (the stem is first)."""
    config.stage_names = config.stage_names[: count + 1]
    config.set_output_features_output_indices(out_features=None, out_indices=None)


def _shorten_lists(config: Any, before: int, depth: int) -> None:
    """Cut the config's per-layer lists (`layer_types` and its kin) to the new depth."""
    for name, value in vars(config).items():
        if "layer" in name and isinstance(value, (list, tuple)) and len(value) == before:
            setattr(config, name, value[:depth])
