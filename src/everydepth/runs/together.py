"""Several processes on one job (`accelerate launch`, torchrun): one of them writes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from everydepth.errors import EveryDepthError, RunError

T = TypeVar("T")
AGREE = 5.0  # seconds in which the others may fail alike


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


@contextmanager
def failing_together() -> Generator[None, None, None]:
    """An error of one process ends all of them, whatever they are waiting for.

    Where only some fail, they say why in the store that all can read, and close the connections
    between the processes: nothing else wakes one that waits for numbers of another. After that,
    this job's processes cannot work together any more. Also works as a decorator.
    """
    if not several():
        yield
        return
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import (
        _abort_process_group,  # pyright: ignore[reportPrivateUsage]
        _get_default_store,  # pyright: ignore[reportPrivateUsage]
    )

    rank, size = _state().process_index, _state().num_processes
    store = _get_default_store()
    call = f"everydepth/{store.add(f'everydepth/{rank}', 1)}"  # all make the same calls
    others = [f"{call}/{n}" for n in range(size) if n != rank]
    try:
        yield
    except Exception as error:
        why = ""
        with suppress(dist.DistError):  # the process that holds the store is gone
            if store.check([f"{call}/why"]):
                why = store.get(f"{call}/why").decode()
            store.set(f"{call}/{rank}", "failed")
            if why or not _set(store, others):
                if not why:
                    store.set(f"{call}/why", f"{type(error).__name__}: {error}")
                _abort_process_group()
                _set(store, others)  # they have read it
        if not why:
            raise
        raise RunError(f"another process of this job, which ended, said {why}") from error


def _set(store: Any, keys: list[str]) -> bool:
    """Whether all keys are set, now or within the time."""
    end = time.monotonic() + AGREE
    while not (found := store.check(keys)) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def _state() -> Any:
    from accelerate import PartialState

    return PartialState(cpu=on_cpus())
