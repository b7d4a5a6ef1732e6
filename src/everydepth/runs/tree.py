"""State dictionaries as JSON plus named tensors: lossless, without pickles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from everydepth.errors import RunError

_TENSOR, _TUPLE, _ITEMS = "__tensor__", "__tuple__", "__items__"
_MARKS = {_TENSOR, _TUPLE, _ITEMS}


def flatten(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """The tree with a name in place of each tensor, and the tensors by name.

    Tensors that share memory (tied weights) are stored once.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[tuple[Any, ...], str] = {}

    def visit(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            name = names.setdefault(key, path) if value.numel() else path
            tensors.setdefault(name, value.detach())
            return {_TENSOR: name}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, list):
            return [visit(item, f"{path}.{i}") for i, item in enumerate(cast(list[Any], value))]
        if isinstance(value, tuple):
            items = cast(tuple[Any, ...], value)
            return {_TUPLE: [visit(item, f"{path}.{i}") for i, item in enumerate(items)]}
        if isinstance(value, Mapping):
            entries = cast(Mapping[Any, Any], value)
            visited = {k: visit(v, f"{path}.{k}" if path else str(k)) for k, v in entries.items()}
            if all(isinstance(k, str) for k in entries) and not _MARKS & visited.keys():
                return visited
            return {_ITEMS: [[visit(k, path), v] for k, v in visited.items()]}
        raise RunError(
            f"{path or 'the state'} is a {type(value).__name__}, which a checkpoint cannot hold; "
            "use tensors, numbers, strings, lists, tuples and dictionaries in state_dict()"
        )

    return visit(tree, ""), tensors


def unflatten(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `flatten`."""
    if isinstance(skeleton, list):
        return [unflatten(item, tensors) for item in cast(list[Any], skeleton)]
    if not isinstance(skeleton, dict):
        return skeleton
    entries = cast(dict[str, Any], skeleton)
    if _TENSOR in entries:
        return tensors[entries[_TENSOR]]
    if _TUPLE in entries:
        return tuple(unflatten(entries[_TUPLE], tensors))
    pairs = entries.get(_ITEMS, entries.items())
    return {unflatten(key, tensors): unflatten(value, tensors) for key, value in pairs}
