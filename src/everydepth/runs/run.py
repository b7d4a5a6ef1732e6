"""A run: one directory with its settings, its environment and its outcome."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError

from everydepth.config import brief, checked
from everydepth.environment import Environment, command_line
from everydepth.errors import RunError
from everydepth.files import (
    TEMPORARY,
    explained,
    is_full,
    read_json,
    remove_folder,
    remove_leftovers,
    write_checksums,
    write_folder,
    write_json,
    write_text,
)
from everydepth.runs.checkpoint import FORMAT, Checkpoint, check_format, whole
from everydepth.runs.holding import HOLDER, LOCK

ENVIRONMENT = "environment.json"
_README = """\
# A run of everydepth: {kind}

| file | what |
|---|---|
| `config.json` | the settings (format {format}) |
| `environment.json` | the command that started it; versions, devices and memory of the machine |
| `metrics.jsonl` | one JSON object per line, in the order of the steps |
| `checkpoints/<step>/` | safetensors and JSON, no pickles; `checkpoints/latest` names the newest |
| `results.json` | the outcome; absent until the run is finished |
| `model/` | the trained model, if there is one; load it with `from_pretrained` |

All files are written atomically, so the directory can be copied or resumed at any time. Read it
with `everydepth.Run.open("{name}")`.
"""


@dataclass(frozen=True)
class Run:
    """A run directory. `Run.create` starts one, `Run.open` reads one.

    >>> run = ed.Run.create("runs/mine", {"lr": 0.1})
    >>> run.log({"step": 1, "loss": 2.5})
    >>> ed.Run.open("runs/mine").metrics()
    [{'step': 1, 'loss': 2.5}]
    """

    path: Path
    kind: str
    config: Mapping[str, Any]

    # -- start and open ---------------------------------------------------------------------------

    @classmethod
    @checked
    @explained("the run cannot be started")
    def create(cls, path: str | Path, config: Mapping[str, Any], *, kind: str = "train") -> Run:
        """Start a run in a directory that does not exist, is empty, or holds a run that was killed
        during its creation."""
        folder = Path(path)
        cls.check_free(folder)
        text = _json(config, "the config of a run")
        run = cls(folder, kind, json.loads(text))
        with run.writing("the run could not be started"):
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            # First: it distinguishes a run killed at this point from an unrelated directory.
            readme = _README.format(kind=kind, format=FORMAT, name=folder.name)
            write_text(folder / "README.md", readme)
            machine = json.loads(Environment.current().to_json())
            write_json(folder / ENVIRONMENT, {"command": command_line(), **machine})
            # Last: its presence makes the directory a run.
            content = {"format": FORMAT, "kind": kind, "config": run.config}
            write_json(folder / "config.json", content)
        return run

    @classmethod
    @checked
    def check_free(cls, path: str | Path) -> None:
        """Raise an error if no run can be started in a directory."""
        folder = Path(path)
        if cls.exists(folder):
            raise RunError(
                f"{folder} already holds a run; continue it with resume (--resume), or use another "
                "directory"
            )
        if folder.exists() and not (folder.is_dir() and all(map(_unbegun, folder.iterdir()))):
            raise RunError(f"{folder} is not an empty directory; use another one for the run")

    @classmethod
    @checked
    def resumed(cls, path: str | Path, config: Mapping[str, Any], *, kind: str = "train") -> Run:
        """The run in a directory if it has this config, or a new one if there is none."""
        if not cls.exists(path):
            return cls.create(path, config, kind=kind)
        run = cls.open(path)
        run.check_config(config)
        return run

    @classmethod
    @checked
    def open(cls, path: str | Path) -> Run:
        """The run in a directory, of this version's format or an older one."""
        folder = Path(path)
        if not cls.exists(folder):
            raise RunError(
                f"{folder} holds no run (no config.json there); "
                "check the path, or start a run in it"
            )
        content = read_json(folder / "config.json")
        with whole(folder / "config.json"):
            check_format(content.get("format"), folder / "config.json")
            return cls(folder, content["kind"], dict(content["config"]))

    @staticmethod
    @checked
    @explained("the run cannot be read")
    def exists(path: str | Path) -> bool:
        return (Path(path) / "config.json").is_file()

    @checked
    def check_config(self, config: Mapping[str, Any]) -> None:
        """Raise an error that lists what changed, if the run was started with another config."""
        changed = changes(self.config, json.loads(_json(config, "the config of a run")))
        if changed:
            raise RunError(
                f"the run in {self.path} was started with other settings: {'; '.join(changed)}. "
                "Resume it with the original settings, or start a new run directory"
            )

    # -- metrics ----------------------------------------------------------------------------------

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @checked
    def log(self, entry: Mapping[str, Any]) -> None:
        """Append one line of metrics."""
        line = _json(entry, "a line of metrics")
        with self.writing("metrics could not be written"), open(self._metrics, "ab") as file:
            file.write(f"{line}\n".encode())

    @explained("the metrics of the run cannot be read")
    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics, without a last one that a killed process left incomplete."""
        if not self._metrics.exists():
            return []
        *lines, _ = self._metrics.read_bytes().split(b"\n")
        repair = "delete that line, or restore the file from a copy"
        try:
            found = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise RunError(
                f"{self._metrics} has a line that is not JSON ({error}); {repair}"
            ) from error
        other = [line for line in found if not isinstance(line, dict)]
        if other:
            raise RunError(f"{self._metrics} has a line with {brief(other[0])}; {repair}")
        return found

    def metrics_size(self) -> int:
        """The size of the metrics in bytes, flushed to disk; for `cut_metrics`."""
        if not self._metrics.exists():
            return 0
        with self.writing("metrics could not be written"), open(self._metrics, "ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def cut_metrics(self, size: Any) -> None:
        """Drop the metrics beyond `size` bytes: a resumed run writes them again.

        size: from a state file, so it may be anything.
        """
        if not self._metrics.exists():
            return
        there = self._metrics.stat().st_size
        # Truncating to a larger size would fill the file, and a reader's memory, with zeros.
        if not isinstance(size, int) or not 0 <= size <= there:
            raise RunError(
                f"the state of the run says that {self._metrics} has {size!r} bytes, but it has "
                f"{there}; restore both from a copy, or delete metrics.jsonl to go on without it"
            )
        with self.writing("metrics could not be cut"):
            os.truncate(self._metrics, size)

    # -- checkpoints ------------------------------------------------------------------------------

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoints(self) -> list[int]:
        """The steps that have a checkpoint, ascending."""
        return sorted(int(p.name) for p in self._checkpoints.glob("[0-9]*") if p.is_dir())

    def latest(self) -> int | None:
        """The step of the newest checkpoint, or None."""
        return self._pointer("latest")

    def best(self) -> int | None:
        """The step of the checkpoint with the best validation, or None."""
        return self._pointer("best")

    @checked
    def checkpoint(self, step: int | None = None) -> Checkpoint:
        """The checkpoint of a step, by default the newest."""
        chosen = self.latest() if step is None else step
        if chosen is None:
            raise RunError(f"the run in {self.path} has no checkpoint yet; start it again")
        if chosen not in self.checkpoints():
            raise RunError(
                f"the run in {self.path} has no checkpoint of step {chosen}; "
                f"it has {', '.join(map(str, self.checkpoints())) or 'none'}"
            )
        return Checkpoint.read(self._folder(chosen))

    @checked
    def save_checkpoint(
        self,
        step: int,
        parts: Mapping[str, Any],
        state: Mapping[str, Any],
        *,
        best: bool = False,
        keep: int = 2,
    ) -> Path:
        """Write a checkpoint, point to it, then delete all but the last `keep` and the best.

        The pointer comes after the checkpoint: a run killed in between repeats the step.

        parts: trees of tensors by file name (`{"model": model.state_dict()}`). state: the rest.
        """
        folder = self._folder(step)
        with self.writing(f"the checkpoint of step {step} could not be written"):
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self._checkpoints)
            Checkpoint.write(folder, step, parts, state)
            if best:
                self.mark_best(step)
            write_text(self._checkpoints / "latest", f"{step}\n")
            self.forget_checkpoints(keep)
        return folder

    def forget_checkpoints(self, keep: int) -> None:
        """Delete all checkpoints but the last `keep` and the best."""
        kept = {*self.checkpoints()[-max(keep, 1) :], self.latest(), self.best()}
        with self.writing("old checkpoints could not be deleted"):
            for old in self.checkpoints():
                if old not in kept:
                    remove_folder(self._folder(old))

    def mark_best(self, step: int) -> None:
        """Point to the checkpoint with the best validation."""
        with self.writing("the best step could not be written"):
            write_text(self._checkpoints / "best", f"{step}\n")

    def _folder(self, step: int) -> Path:
        return self._checkpoints / f"{step:08d}"

    @explained("the checkpoints of the run cannot be read")
    def _pointer(self, name: str) -> int | None:
        file = self._checkpoints / name
        if not file.exists():
            return None
        text = file.read_text(encoding="utf-8").strip()
        if not text.isdigit():
            raise RunError(
                f"{file} holds {text[:40]!r}, but a step is a whole number; "
                f"write one of {', '.join(map(str, self.checkpoints()))} into it"
            )
        return int(text)

    # -- results ----------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return (self.path / "results.json").exists()

    def results(self) -> dict[str, Any]:
        """The outcome of a finished run."""
        if not self.finished:
            raise RunError(f"the run in {self.path} has no results yet; resume it to the end")
        content = read_json(self.path / "results.json")
        with whole(self.path / "results.json"):
            check_format(content.get("format"), self.path / "results.json")
            return content["results"]

    @checked
    def write_results(self, results: Mapping[str, Any]) -> None:
        _json(results, "the results of a run")
        with self.writing("the results could not be written"):
            write_json(self.path / "results.json", {"format": FORMAT, "results": results})

    def write_folder(self, name: str, fill: Callable[[Path], None]) -> Path:
        """A folder of the run, such as `model`, that `fill` writes; atomic."""

        def filled(folder: Path) -> None:
            fill(folder)
            write_checksums(folder)

        with self.writing(f"the folder {name} could not be written"):
            write_folder(self.path / name, filled)
        return self.path / name

    @contextmanager
    def writing(self, what: str) -> Generator[None, None, None]:
        """Turn disk errors inside into a `RunError`; if the disk is full, it says what is safe."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            if not is_full(error):
                with explained(f"{what} in {self.path}"):
                    raise OSError(*error.args) from error
            newest = self.latest()
            safe = (
                "there is no earlier checkpoint"
                if newest is None
                else f"the checkpoint of step {newest} is intact"
            )
            free = shutil.disk_usage(self.path if self.path.exists() else ".").free
            raise RunError(
                f"the disk is full ({free / 2**20:.1f} MiB free): {what} in {self.path}; {safe}. "
                "Free some space, then resume the run"
            ) from error


def _unbegun(entry: Path) -> bool:
    """Whether an entry of a directory is something a run writes during its creation."""
    if entry.name == "checkpoints":
        return entry.is_dir() and not any(entry.iterdir())
    if entry.name == "README.md":
        return entry.is_file() and entry.read_bytes().startswith(_README[:22].encode())
    if entry.name == ENVIRONMENT:
        return (entry.parent / "README.md").is_file()  # which shows whose directory it is
    return entry.name.startswith(TEMPORARY) or entry.name in (LOCK, HOLDER)


def _json(value: Any, what: str) -> str:
    try:
        return json.dumps(value)
    except (RecursionError, TypeError, ValueError) as error:
        raise RunError(
            f"{what} must be JSON ({error}); use numbers, strings, lists and dictionaries"
        ) from error


def changes(before: Any, after: Any, name: str = "") -> list[str]:
    """The differences between two JSON values, one readable line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        old, new = cast(dict[str, Any], before), cast(dict[str, Any], after)
        found: list[str] = []
        for key in dict.fromkeys((*old, *new)):
            found += changes(old.get(key), new.get(key), f"{name}.{key}" if name else key)
        return found
    if isinstance(before, list | tuple) and isinstance(after, list | tuple):
        before, after = list(before), list(after)
    return [] if before == after else [f"{name} {before!r} -> {after!r}"]
