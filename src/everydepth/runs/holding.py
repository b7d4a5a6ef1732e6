"""One writer a run directory."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from everydepth.environment import command_line
from everydepth.errors import RunError
from everydepth.files import explained, remove_leftovers, write_json

LOCK, HOLDER = ".lock", ".holder.json"


@contextmanager
def held(path: str | Path) -> Generator[None, None, None]:
    """Keep other processes from writing to a run directory, which is made if it is not there.

    The operating system holds the lock, on network file systems too, and frees it when the
    process dies, however it dies. What a killed process left half written is deleted.

    >>> from everydepth.runs import held
    >>> with held("runs/mine"):
    ...     with held("runs/mine"):
    ...         pass
    Traceback (most recent call last):
    everydepth.errors.RunError: runs/mine is written by process ...
    """
    folder = Path(path)
    lock = FileLock(folder / LOCK)
    try:
        with explained(f"the run directory {folder} cannot be written"):
            folder.mkdir(parents=True, exist_ok=True)
            _acquire(lock, folder)
            _announce(folder)
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):  # a note that is left behind does not hold the directory
                (folder / HOLDER).unlink(missing_ok=True)
            lock.release()


def _acquire(lock: BaseFileLock, folder: Path) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RunError(
            f"{folder} is written by {_holder(folder)}; wait for it or end it, or use another "
            "directory"
        ) from error


def _announce(folder: Path) -> None:
    for place in (folder, *(entry for entry in folder.iterdir() if entry.is_dir())):
        remove_leftovers(place)
    who = {"process": os.getpid(), "host": socket.gethostname(), "command": command_line()}
    write_json(folder / HOLDER, who | {"since": datetime.now(UTC).isoformat("T", "seconds")})


def _holder(folder: Path) -> str:
    try:
        who: dict[str, Any] = json.loads((folder / HOLDER).read_text(encoding="utf-8"))
        command = f" ({who['command']})" if who["command"] else ""
        return f"process {who['process']} on {who['host']}{command} since {who['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # which has just begun
