"""Many independent jobs: one after the other here, or at once on a Ray cluster."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar, cast

from everydepth.errors import RunError, SettingError

Engine = Literal["local", "ray"]
T = TypeVar("T")
R = TypeVar("R")


def check_engine(engine: str) -> None:
    """An error before anything is written, if there is no such engine."""
    if engine not in ("local", "ray"):
        raise SettingError(f"engine={engine!r}; use 'local' or 'ray'")


def each(
    run: Callable[[T], R], items: Sequence[T], engine: str, address: str | None = None
) -> Iterator[tuple[T, R]]:
    """Every item with `run(item)`, as they are done.

    address: of a Ray cluster; without, one on this machine, which ends with the jobs.
    """
    check_engine(engine)
    return _on_ray(run, items, address) if engine == "ray" else ((i, run(i)) for i in items)


def _on_ray(
    run: Callable[[T], R], items: Sequence[T], address: str | None
) -> Iterator[tuple[T, R]]:
    try:
        import ray as package
    except ImportError as error:
        raise SettingError(
            "engine='ray', but Ray is not installed; pip install 'everydepth[ray]', or use "
            "engine='local'"
        ) from error
    ray = cast(Any, package)
    started = not ray.is_initialized()
    if started:
        _check_answers(address)
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                include_dashboard=False if address is None else None,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _silent(address, error) from error
    try:
        # What all jobs share (models, data) is sent once. A task has one core, and one thread.
        shared, task = ray.put(run), ray.remote(_call)
        waiting = {task.remote(shared, item): item for item in items}
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1)
            yield waiting.pop(done[0]), ray.get(done[0])
    finally:
        if started:
            ray.shutdown()


def _call(run: Callable[[T], R], item: T) -> R:
    return run(item)


def _check_answers(address: str | None) -> None:
    """Ray itself would go on trying a dead address for many minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise _silent(address, error) from error


def _silent(address: str | None, error: Exception) -> RunError:
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return RunError(
        f"no Ray cluster answers at {address!r} ({first}); start one with `ray start --head`, "
        "check the address, or use engine='local'. Finished cells are kept"
    )


__all__ = ["Engine", "check_engine", "each"]
