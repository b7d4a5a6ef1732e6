"""A lock that allows one writer per run directory."""

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

from everydepth.config import checked
from everydepth.environment import command_line
from everydepth.errors import RunError
from everydepth.files import explained, remove_leftovers, write_json

LOCK, HOLDER = ".lock", ".holder.json"


@checked
@contextmanager
def held(path: str | Path) -> Generator[None, None, None]:
    """Keep other processes from writing to a run directory, creating it if needed.

    The operating system holds the lock, even on network file systems, and releases it when the
    process dies for any reason. Files that a killed process left incomplete are deleted.

    >>> from everydepth.runs import held
    >>> with held("runs/mine"):
    ...     with held("runs/mine"):
    ...         pass
    Traceback (most recent call last):
    everydepth.errors.RunError: runs/mine is in use by process ...
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
            with suppress(OSError):  # a leftover note does not hold the directory
                (folder / HOLDER).unlink(missing_ok=True)
            lock.release()


def _acquire(lock: BaseFileLock, folder: Path) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RunError(
            f"{folder} is in use by {_holder(folder)}; wait for it or end it, or use another "
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
        return "another process"  # which has just started
