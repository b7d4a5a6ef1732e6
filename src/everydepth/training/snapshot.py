"""The state of a run in plain tensors, gathered from all processes."""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from everydepth.errors import RunError
from everydepth.training.module import EveryDepth


def whole(value: Any, *, keep: bool) -> Any:
    """A tree with its tensors gathered on the CPU. All processes must call it.

    keep: False returns None for each tensor, in processes that only help to gather them.
    """
    if isinstance(value, Tensor):
        full = value.full_tensor() if isinstance(value, DTensor) else value
        return full.detach().cpu() if keep else None
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        return {key: whole(item, keep=keep) for key, item in items}
    return value


def _placed(value: Any, like: Any) -> Any:
    """A whole tensor, distributed over processes like `like`."""
    if isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape:
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value


# -- the model ----------------------------------------------------------------------------------


def model_state(net: EveryDepth, *, keep: bool) -> dict[str, Tensor]:
    return whole(net.state_dict(keep_vars=True), keep=keep)  # tied weights stay one tensor


def load_model(net: EveryDepth, state: Mapping[str, Tensor], source: object) -> None:
    """Copy a gathered state into the network; an error if it does not fit."""
    own = net.state_dict(keep_vars=True)
    differ = _difference(
        {key: tuple(value.shape) for key, value in state.items()},
        {key: tuple(value.shape) for key, value in own.items()},
    )
    if differ:
        raise RunError(
            f"{source} belongs to another model: {differ}. Use the model the run was started with, "
            "or start a new run directory"
        )
    with torch.no_grad():
        for key, value in own.items():
            value.copy_(_placed(state[key], value))


def _difference(saved: dict[str, Any], own: dict[str, Any]) -> str:
    for key, shape in saved.items():
        if key not in own:
            return f"it has {key} {shape}, which this model lacks"
        if own[key] != shape:
            return f"its {key} has shape {shape}, this model's has {own[key]}"
    missing = next((key for key in own if key not in saved), None)
    return "" if missing is None else f"it lacks this model's {missing} {own[missing]}"


# -- the optimizer --------------------------------------------------------------------------------


def optimizer_state(net: nn.Module, optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
    """The state by parameter name, independent of the number of processes."""
    names = _names(net, optimizer)
    state = optimizer.state_dict()
    return {
        "state": {names[index]: whole(value, keep=keep) for index, value in state["state"].items()},
        "groups": [
            {**group, "params": [names[index] for index in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def load_optimizer(
    net: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any], source: object
) -> None:
    """Restore what `optimizer_state` returned; an error if it does not fit."""
    names = _names(net, optimizer)
    index = {name: number for number, name in enumerate(names)}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = [name for group in saved["groups"] for name in group["params"]]
    if sorted(found) != sorted(names):
        raise RunError(
            f"{source} has the optimizer state of {len(found)} parameters, but this optimizer has "
            f"{len(names)}; use the optimizer the run was started with"
        )
    optimizer.load_state_dict(
        {
            "state": {
                index[name]: {k: _placed(v, parameters[index[name]]) for k, v in values.items()}
                for name, values in saved["state"].items()
            },
            "param_groups": [
                {**group, "params": [index[name] for name in group["params"]]}
                for group in saved["groups"]
            ],
        }
    )


def _names(net: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in its order."""
    # A run may go on compiled, or no longer compiled.
    by_id = {id(p): name.replace("_orig_mod.", "") for name, p in net.named_parameters()}
    return [by_id[id(p)] for group in optimizer.param_groups for p in group["params"]]


# -- random numbers -------------------------------------------------------------------------------


def random_state(generators: list[torch.Generator]) -> dict[str, Any]:
    """All random states of this process, as JSON values."""
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))  # noqa: NPY002
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": _hex(torch.get_rng_state()),
        "cuda": _hex(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
        "generators": [_hex(generator.get_state()) for generator in generators],
    }


def set_random_state(state: Mapping[str, Any], generators: list[torch.Generator]) -> None:
    """Restore what `random_state` returned."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(_bytes(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))
    for generator, saved in zip(generators, state["generators"], strict=True):
        generator.set_state(_bytes(saved))


@contextmanager
def kept_random_state() -> Generator[None, None, None]:
    """Restore the global random states on exit."""
    before = random_state([])
    try:
        yield
    finally:
        set_random_state(before, [])


def seed_everything(seed: int, *stream: int) -> None:
    """Seed Python, numpy and torch; `stream` numbers give independent random streams."""
    drawn = np.random.SeedSequence([seed, *stream]).generate_state(3)
    random.seed(int(drawn[0]))
    np.random.seed(int(drawn[1]))  # noqa: NPY002 - datasets may use the legacy state
    torch.manual_seed(int(drawn[2]))


def _hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
