"""What no call may change: weights, gradients, modes, hooks, random numbers, other directories."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.helpers.folders import tree
from torch import nn

_HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]


def _of_model(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found[f"{name} (weights)"] = tensor.detach().clone()
        found[f"{name} (requires_grad)"] = tensor.requires_grad
        found[f"{name} (gradient)"] = None if tensor.grad is None else tensor.grad.clone()
    for name, module in model.named_modules():
        found[f"{name} (mode)"] = module.training
        found[f"{name} (hooks)"] = [len(getattr(module, hooks)) for hooks in _HOOKS]
        found[f"{name} (forward)"] = "forward" in vars(module)
    return found


def _random() -> dict[str, Any]:
    return {
        "torch's random state": torch.get_rng_state(),
        "numpy's random state": np.random.get_state()[1].tobytes(),  # noqa: NPY002
        "Python's random state": random.getstate(),
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
    }


def empty(folder: Path) -> None:
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


@contextmanager
def unchanged(*models: nn.Module, folder: Path, but: tuple[str, ...] = ()) -> Iterator[None]:
    """Whatever happens inside, also an error, all is as it was.

    Random states are those of no seed that a call would set by itself.
    folder: as it was, too. but: how the names of those end that may change.
    """

    def state() -> dict[str, Any]:
        found = _random() | {f"{folder}": tree(folder)}
        for model in models:
            found |= _of_model(model)
        return found

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(987_654_321)
    before = state()
    try:
        yield
    finally:
        after = state()
        changed = [key for key, value in before.items() if not _same(value, after.get(key))]
        changed = [key for key in changed if not key.endswith(but)]
        assert not changed, f"changed: {', '.join(changed[:8])}"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a.nan_to_num(), b.nan_to_num())
    return a == b
