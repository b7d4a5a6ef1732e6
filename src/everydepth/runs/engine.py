"""Run independent jobs one after the other, in several processes, or on a Ray cluster."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, TypeVar, cast

from everydepth.config import Config, setting
from everydepth.errors import RunError, SettingError

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Config):
    """Where jobs run: "local", one after the other in this process; "processes", in several on
    this machine, each with one compute thread; "ray", on a Ray cluster, one task per job.

    >>> from everydepth.runs.engine import EngineConfig
    >>> EngineConfig(engine="processes", processes=4).engine
    'processes'
    """

    title: ClassVar[str] = "Where"

    engine: str = setting("local", choices=("local", "processes", "ray"), help="Where cells run.")
    processes: int | None = setting(
        None, least=1, help="Number of processes with engine processes; by default one per core."
    )
    address: str | None = setting(
        None, help="Address of a Ray cluster; by default a temporary one on this machine."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, engine in (("processes", "processes"), ("address", "ray")):
            value = getattr(self, name)
            if value is not None and self.engine != engine:
                raise SettingError(
                    f"{name}={value!r} with engine={self.engine!r}; use engine={engine!r}, or "
                    "leave it out"
                )


def each(
    function: Callable[[T], R],
    items: Sequence[T],
    where: EngineConfig,
) -> Iterator[tuple[T, R]]:
    """Yield every item with `function(item)`, in the order they finish.

    After a failure no new item starts. Those that are running finish and are yielded; then the
    error is raised, with a note that names its item.
    """
    failed: list[Exception] = []
    # Engines pull items one by one, so that none starts after a failure.
    left = (item for item in items if not failed)
    if where.engine == "ray":
        outcomes = _on_ray(function, left, where.address)
    elif where.engine == "processes":
        outcomes = _in_processes(function, left, where.processes)
    else:
        outcomes = (_tried(function, item) for item in left)
    for item, result, error in outcomes:
        if error is None:
            yield item, cast(R, result)
        else:
            error.add_note(f"in the cell {item}")
            failed.append(error)
    if failed:
        raise failed[0]


Tried = tuple[T, R | None, Exception | None]
"""An item, and its result or error."""


def _tried(function: Callable[[T], R], item: T) -> Tried[T, R]:
    try:
        return item, function(item), None
    except Exception as error:  # noqa: BLE001 - `each` raises it, whatever it is
        return item, None, error


def _elsewhere(function: Callable[[T], R], item: T) -> tuple[Tried[T, R], str]:
    """`_tried` in another process, and the traceback as text: pickling an error drops it."""
    item, result, error = _tried(function, item)
    trace = "" if error is None else "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own, made one line before
    except Exception:  # noqa: BLE001 - an error that cannot be pickled: send its message
        error = RunError(f"{type(error).__name__}: {error}")
    return (item, result, error), trace


def _arrived(tried: Tried[T, R], trace: str) -> Tried[T, R]:
    if tried[2] is not None:
        tried[2].add_note(trace)
    return tried


# -- processes of this machine --------------------------------------------------------------------


def _in_processes(
    function: Callable[[T], R], items: Iterator[T], count: int | None
) -> Iterator[Tried[T, R]]:
    # loky can pickle functions defined in a script, and does not run the script again.
    import loky

    package = cast(Any, loky)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    count = count or package.cpu_count()
    try:
        with package.ProcessPoolExecutor(
            count, env=threads, initializer=_begun, initargs=(os.getpid(),)
        ) as pool:
            try:
                running = {pool.submit(_elsewhere, function, item) for item in islice(items, count)}
                while running:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield _arrived(*future.result())
                    more = islice(items, len(done))
                    running |= {pool.submit(_elsewhere, function, item) for item in more}
            except (KeyboardInterrupt, SystemExit):
                # A `fit` ends its step and keeps it; anything else ends at once.
                for process in pool._processes.values():
                    process.terminate()
                raise
    except BrokenExecutor as error:
        raise RunError(
            "a process that ran a cell died (out of memory, or killed); finished cells are kept. "
            "Repeat the call to continue, perhaps with fewer processes"
        ) from error


def _begun(parent: int) -> None:
    """In a new process: ignore Ctrl-C, which the parent handles, and end when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_until_orphaned, args=(parent,), daemon=True).start()


def _until_orphaned(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)  # or it would hold its cell's folder for as long as the cell takes


# -- Ray ------------------------------------------------------------------------------------------


def _on_ray(
    function: Callable[[T], R], items: Iterator[T], address: str | None
) -> Iterator[Tried[T, R]]:
    """address: of a cluster; by default a temporary one on this machine."""
    try:
        import ray as package
    except ImportError as error:
        raise SettingError(
            "engine='ray', but Ray is not installed; pip install 'everydepth[ray]', or use "
            "engine='processes'"
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
        # What all jobs share (models, data) is sent once. A task gets one core and one thread.
        shared, task = ray.put(function), ray.remote(_elsewhere)
        # Twice as many tasks as cores: the queue makes an autoscaling cluster grow.
        most = 2 * max(int(ray.cluster_resources().get("CPU", 1)), 1)
        waiting: list[Any] = []
        while True:
            while len(waiting) < most and (item := next(items, _END)) is not _END:
                waiting.append(task.remote(shared, item))
            if not waiting:
                return
            done, waiting = ray.wait(waiting, num_returns=1)
            yield _arrived(*ray.get(done[0]))
    finally:
        if started:
            ray.shutdown()


_END: Any = object()


def _check_answers(address: str | None) -> None:
    """Ray itself would keep trying a dead address for many minutes."""
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
        "check the address, or use engine='processes'. Finished cells are kept"
    )
