"""Cells: the pieces of a sweep, each done once even if the machine crashes in between."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from everydepth.errors import RunError, SettingError
from everydepth.files import explained, read_json, remove_leftovers, write_json
from everydepth.progress import shown
from everydepth.runs.engine import EngineConfig, each
from everydepth.runs.run import Run
from everydepth.runs.together import is_main, on_main, several, wait_for_all
from everydepth.signals import Signals, leave

Cell = dict[str, Any]
Cells = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]
Function = Callable[..., Mapping[str, Any]]
"""The work of a cell: `function(**cell)` returns a dictionary of JSON values."""


@dataclass(frozen=True)
class Outcome:
    """By key of a cell: its results, or why it was skipped."""

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def cells_of(grid: Cells) -> tuple[Cell, ...]:
    """The cells of a grid; an error if it has none, or one twice."""
    if isinstance(grid, Mapping):
        for name, values in grid.items():
            if isinstance(values, str) or not hasattr(values, "__iter__"):
                raise SettingError(f"grid[{name!r}] is {values!r}; give a list of values")
        chosen = itertools.product(*grid.values())
        cells = [dict(zip(grid, values, strict=True)) for values in chosen]
    else:
        cells = [dict(cell) for cell in grid]
    if not grid or not cells:
        raise SettingError("the grid has no cells; give every name at least one value")
    seen: set[str] = set()
    for cell in cells:
        key = cell_key(cell)
        if key in seen:
            raise SettingError(f"the cell {cell} is in the grid twice; leave one out")
        seen.add(key)
    return tuple(cells)


def cell_key(cell: Mapping[str, Any]) -> str:
    """The file name of a cell; it does not depend on the order of settings."""
    try:
        text = json.dumps(cell, sort_keys=True)
    except TypeError as error:
        raise SettingError(
            f"the cell {dict(cell)} is not JSON ({error}); use numbers, strings and lists"
        ) from error
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@explained("the finished cells cannot be read")
def finished_cells(cells: Sequence[Cell], path: Path) -> Outcome:
    """The cells that are already done in a run directory."""
    files = {cell_key(cell): path / "cells" / f"{cell_key(cell)}.json" for cell in cells}
    return Outcome({key: _saved(file) for key, file in files.items() if file.exists()})


def _saved(file: Path) -> dict[str, Any]:
    content = read_json(file)
    result = content.get("result") if isinstance(content, dict) else None
    if not isinstance(result, dict):
        raise RunError(f"{file} does not hold the result of a cell; delete it to do the cell again")
    found = cast(dict[str, Any], content)
    # Version 0.1.0 wrote none.
    if "checksum" in found and found["checksum"] != _checksum(found.get("cell"), result):
        raise RunError(f"{file} is damaged: its checksum differs; delete it to do the cell again")
    return cast(dict[str, Any], result)


def _checksum(cell: Any, result: Any) -> str:
    return hashlib.sha256(json.dumps([cell, result], sort_keys=True).encode()).hexdigest()


def run_cells(
    cells: Sequence[Cell],
    function: Function,
    *,
    run: Run | None,
    where: EngineConfig,
    folders: bool = False,
    skips: type[Exception] | tuple[type[Exception], ...] = (),
    title: str = "cells",
    progress: bool = True,
) -> Outcome:
    """Do the cells that are not yet done in `run`, and save each as soon as it ends.

    Under `accelerate launch`, all processes work together on one cell after the other, and only
    the main one writes. `folders`, `skips`: see `sweep`.
    """
    if several() and where.engine != "local":
        raise SettingError(
            f"engine={where.engine!r} under `accelerate launch`, whose processes already share "
            "every cell; use engine='local', or start one process"
        )
    outcome = Outcome()
    if run is not None:
        on_main(lambda: _prepare(run, cells))
        outcome = finished_cells(cells, run.path)
        wait_for_all()  # before the first is written, so that all see the same cells to do
    todo = [cell for cell in cells if cell_key(cell) not in outcome.results]
    work = _Work(function, None if run is None else run.path, folders, skips)
    try:
        with Signals(at_once=True) as signals:
            ended = each(work, todo, where)
            for cell, (result, why) in shown(ended, title, total=len(todo), enabled=progress):
                if signals.received is not None:
                    leave(signals.received)  # caught inside the cell, which may be incomplete
                key = cell_key(cell)
                if result is None:
                    outcome.skipped[key] = why
                    continue
                outcome.results[key] = result
                if run is not None and is_main():
                    done = {"cell": cell, "result": result, "checksum": _checksum(cell, result)}
                    with run.writing("a cell could not be saved"):
                        write_json(run.path / "cells" / f"{key}.json", done)
    except (Exception, KeyboardInterrupt) as error:
        kept = "but lost without run=" if run is None else f"and saved in {run.path}"
        error.add_note(f"{len(outcome.results)} of {len(cells)} cells are done, {kept}")
        raise
    return outcome


@dataclass(frozen=True)
class _Work:
    """One cell, wherever it runs: its result, or why it was skipped."""

    function: Function
    path: Path | None
    folders: bool
    skips: type[Exception] | tuple[type[Exception], ...]

    def __call__(self, cell: Cell) -> tuple[dict[str, Any] | None, str]:
        folder = None
        if self.folders and self.path is not None:
            folder = self.path / "work" / cell_key(cell)
            with explained("the folder of a cell cannot be created"):
                folder.mkdir(parents=True, exist_ok=True)
        own = {"folder": folder} if self.folders else {}
        try:
            result = self.function(**cell, **own)
        except self.skips as error:
            return None, str(error)
        if folder is not None and is_main() and not any(folder.iterdir()):
            with explained("the empty folder of a cell cannot be deleted"):
                folder.rmdir()
        return _plain(cell, result), ""


def _prepare(run: Run, cells: Sequence[Cell]) -> None:
    folder = run.path / "cells"
    with run.writing("the folder of cells could not be created"):
        folder.mkdir(exist_ok=True)
        remove_leftovers(folder)
    if any(not (folder / f"{cell_key(cell)}.json").exists() for cell in cells):
        # Cells were added to a finished sweep: its summary is incomplete.
        with run.writing("the earlier results could not be deleted"):
            (run.path / "results.json").unlink(missing_ok=True)


def _plain(cell: Cell, result: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(dict(result)))
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"the cell {cell} returned a {type(result).__name__} that is not a dictionary of JSON "
            f"values ({error}); return numbers, strings and lists by name"
        ) from error
