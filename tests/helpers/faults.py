"""A disk that fails, or a process that dies, at the Nth operation that changes a run directory.

python -m tests.helpers.faults JOB HOW[,HOW...] FOLDER [POINT ...]

runs the job once in peace and counts its operations; then, for each point (all by default), once
more with the fault there, resumes it, and compares every byte of the two directories. What it
prints is JSON. Each run is a fork of its own, so that a kill is a real one.
"""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import serialize
from tests.helpers.growth import mlp, teacher_data
from tests.helpers.training import net, points

import everydepth as ed
from everydepth.errors import EveryDepthError
from everydepth.files import TEMPORARY
from everydepth_papers.evidence import Preset, Recipe, Row, reproduce

QUIET: dict[str, Any] = {"progress": False}

# -- the disk ---------------------------------------------------------------------------------


class Disk:
    """Counts what changes a folder; `happens(number, what)` is called before each operation.

    Python says what it opens, makes, moves and removes (`sys.addaudithook`); syncs and writes are
    wrapped, each write with an operation in its middle. safetensors writes through Python, too.
    """

    def __init__(self, folder: Path, happens: Callable[[int, str], None]) -> None:
        self.folder, self.happens, self.number, self.on = str(folder), happens, 0, True
        sys.addaudithook(self._event)
        real_open, real_sync = io.open, os.fsync

        def opened(file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
            found = real_open(file, mode, *args, **named)
            return _Halved(found, self) if _writes(mode) and self._inside(file) else found

        def synced(handle: int) -> None:
            self._operation("fsync", f"/proc/self/fd/{handle}")
            real_sync(handle)

        def serialized(tensors: Any, filename: Any, metadata: Any = None) -> None:
            with open(filename, "wb") as file:
                file.write(serialize(tensors, metadata))

        builtins.open = io.open = opened
        os.fsync = synced
        safetensors.torch.serialize_file = serialized  # pyright: ignore[reportPrivateImportUsage]

    def _event(self, event: str, given: tuple[Any, ...]) -> None:
        if not self.on or event not in _EVENTS:
            return
        if event == "open" and not _writes(given[1], given[2]):
            return
        name, handle = given[0], next((x for x in given[-1:] if isinstance(x, int)), -1)
        if event in ("os.remove", "os.rmdir", "os.mkdir") and handle >= 0:
            name = f"/proc/self/fd/{handle}"
        self._operation(event, name)

    def _operation(self, what: str, name: Any) -> None:
        if not self.on or not self._inside(name):
            return
        self.number += 1
        self.on = False  # what happens may touch the disk itself
        try:
            self.happens(self.number, what)
        finally:
            self.on = True

    def _inside(self, name: Any) -> bool:
        if isinstance(name, int):
            return False
        path = os.fsdecode(name)
        path = os.path.realpath(path) if path.startswith("/proc/") else os.path.abspath(path)
        return path == self.folder or path.startswith(self.folder + os.sep)


_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}


def _writes(mode: Any, flags: int = 0) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


class _Halved:
    """A file whose every write can be cut in the middle."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, content: Any) -> int:
        half = len(content) // 2
        self._file.write(content[:half])
        self._file.flush()
        self._disk._operation("write", self._file.name)
        self._file.write(content[half:])
        return len(content)

    def __enter__(self) -> _Halved:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


# -- what happens -----------------------------------------------------------------------------


def killed(at: int, folder: Path) -> Callable[[int, str], None]:
    def happens(number: int, what: str) -> None:
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return happens


def refused(at: int, code: int, but: tuple[str, ...] = ()) -> Callable[[int, str], None]:
    """From some operation on the disk says no."""

    def happens(number: int, what: str) -> None:
        if number >= at and what not in but:
            raise OSError(code, os.strerror(code))

    return happens


def full(at: int, folder: Path) -> Callable[[int, str], None]:
    """Nothing more can be written; what is there can be moved and deleted."""
    return refused(at, errno.ENOSPC, ("os.rename", "os.remove", "os.rmdir", "os.truncate"))


def read_only(at: int, folder: Path) -> Callable[[int, str], None]:
    return refused(at, errno.EROFS)


def vanished(at: int, folder: Path) -> Callable[[int, str], None]:
    """The whole directory is moved away; `returned` puts it back."""

    def happens(number: int, what: str) -> None:
        if number == at:
            os.rename(folder, folder.with_name("away"))

    return happens


def returned(folder: Path) -> None:
    away = folder.with_name("away")
    if away.exists():
        if folder.exists():  # made anew by what was going on
            os.rename(folder, folder.with_name("anew"))
        os.rename(away, folder)


HOW = {"killed": killed, "full": full, "read_only": read_only, "vanished": vanished}

# -- jobs -------------------------------------------------------------------------------------


def train(run: Path) -> None:
    settings: dict[str, Any] = {"steps": 5, "batch_size": 16, "save_every": 2, "log_every": 2}
    ed.fit(net(), points(32), points(16, 1), run=run, resume=True, **settings, **QUIET)


def grow(run: Path) -> None:
    settings: dict[str, Any] = {"steps": 6, "rounds": 2, "batch_size": 64, "lr": 3e-3}
    train, valid = teacher_data(128, 0), teacher_data(100, 1)
    ed.grow(mlp(), train, valid, run=run, resume=True, **settings, **QUIET)


def _cell(a: int, folder: Path) -> dict[str, Any]:
    ed.fit(net(seed=a), points(32), steps=2, run=folder, resume=True, **QUIET)
    return {"loss": ed.Run.open(folder).metrics()[-1]["loss"]}


def sweep(run: Path) -> None:
    ed.sweep({"a": [1, 2]}, _cell, run=run, folders=True, **QUIET)


def recipe(run: Path) -> None:
    cells = ({"a": 1}, {"a": 2})
    made = Recipe(
        name="short",
        title="A short one",
        item="Another Paper, Table 1",
        cell=lambda cell, seed, folder: {"value": cell["a"] + seed},
        rows=lambda done: [Row("value", 1.5, sum(d.values["value"] for d in done), 0, 9, "")],
        about="Nothing is trained.",
        presets={"smoke": Preset(cells=cells, seeds=2, cost="1 s")},
    )
    reproduce(made, run=run, **QUIET)


JOBS = {"train": train, "grow": grow, "sweep": sweep, "reproduce": recipe}

# -- one after the other ------------------------------------------------------------------------


_OTHER = (".lock", "environment.json")


def content(run: Path) -> dict[str, bytes]:
    """Every file of a run directory but the lock, and how much memory the machine had free."""
    found = {str(file.relative_to(run)): file for file in sorted(run.rglob("*")) if file.is_file()}
    return {
        name: file.read_bytes() for name, file in found.items() if Path(name).name not in _OTHER
    }


def forked(job: Callable[[], Any], said: Path) -> tuple[int, str]:
    """How a fork ended: its status, and what it wrote to `said`."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            said.write_text(str(job()))
            code = 0
        except EveryDepthError as error:
            said.write_text(f"{type(error).__name__}: {error}")
            code = 2
        except BaseException:  # noqa: BLE001 - what is no error of ours is what is looked for
            said.write_text(traceback.format_exc())
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), said.read_text() if said.exists() else ""


def fault(job: str, how: str, home: Path, at: int) -> tuple[dict[str, bytes], str]:
    """A run with a fault at one operation, resumed: what is there, and what was wrong with it."""
    run, said = home / "run", home / "said"
    home.mkdir(parents=True)

    def with_fault() -> int:
        disk = Disk(run, HOW[how](at, run))
        JOBS[job](run)
        return disk.number

    code, words = forked(with_fault, said)
    said.unlink(missing_ok=True)
    returned(run)
    wrong = ""
    if how == "killed" and at and code != -signal.SIGKILL:
        wrong = f"not killed, but {code}: {words}"
    if how != "killed" and code not in (0, 2):
        wrong = f"ended with {code}: {words[-400:]}"
    if code == 2 and "\n" in words:
        wrong = f"more than one line: {words}"
    code, again = forked(lambda: JOBS[job](run), said)
    if code != 0 and not wrong:
        wrong = f"not resumed ({code}): {again[-400:]}"
    return content(run), wrong or (f"said {words}" if how != "killed" else "")


def main(job: str, how: str, folder: str, *wanted: str) -> None:
    torch.set_num_threads(1)
    time.perf_counter = lambda: 0.0  # seconds are part of what is written
    home = Path(folder).resolve()
    JOBS[job](home / "warm" / "run")

    def counted() -> int:
        disk = Disk(home / "whole" / "run", lambda *_: None)
        JOBS[job](home / "whole" / "run")
        return disk.number

    (home / "whole").mkdir()
    code, number = forked(counted, home / "said")
    assert code == 0, number
    whole, operations = content(home / "whole" / "run"), int(number)
    failures: dict[str, str] = {}
    messages: set[str] = set()
    chosen = [1 + int(point) % operations for point in wanted] or list(range(1, operations + 1))
    for one, point in itertools.product(how.split(","), chosen):
        found, words = fault(job, one, home / one / str(point), point)
        differ = [name for name in {*whole, *found} if whole.get(name) != found.get(name)]
        left = [name for name in found if TEMPORARY in name]
        if words and not words.startswith("said"):
            failures[f"{one} {point}"] = words
        elif differ or left:
            failures[f"{one} {point}"] = f"differ: {sorted(differ)}, left: {left}; {words}"
        else:
            messages.add(words)
    print(
        json.dumps(
            {
                "operations": operations,
                "tried": len(chosen),
                "failures": failures,
                "messages": sorted(messages),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
