"""Several processes on one job (`accelerate launch`, torchrun): one of them writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from everydepth.errors import EveryDepthError

T = TypeVar("T")


def several() -> bool:
    """Whether this process was started as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def on_cpus() -> bool:
    """Whether the processes use CPUs; torchrun does not tell accelerate, so we do."""
    import torch
    from accelerate.utils import parse_flag_from_env

    asked = parse_flag_from_env("ACCELERATE_USE_CPU")
    return asked or (several() and not torch.accelerator.is_available())


def is_main() -> bool:
    """Whether this process writes files and messages."""
    return int(os.environ.get("RANK", "0")) == 0


def wait_for_all() -> None:
    """Wait until all processes get here."""
    if several():
        _state().wait_for_everyone()


def on_main(action: Callable[[], T]) -> T:
    """Run an action in the main process; every process gets its result, or its error."""
    if not several():
        return action()
    from accelerate.utils import broadcast_object_list

    outcome: list[Any] = [None, None]
    if _state().is_main_process:
        try:
            outcome[0] = action()
        except EveryDepthError as error:
            outcome[1] = error
    broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _state() -> Any:
    from accelerate import PartialState

    return PartialState(cpu=on_cpus())
