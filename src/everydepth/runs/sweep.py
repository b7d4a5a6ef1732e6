"""Sweeps: many trainings, each once, whatever happens to the machine in between."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from everydepth.errors import RunError, SettingError
from everydepth.files import read_json, remove_leftovers, write_json
from everydepth.runs import Run
from everydepth.runs.engine import check_engine, each

Cell = dict[str, Any]
Cells = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Sweep:
    """The cells of a sweep and what is done of them. Results are plain JSON, one file a cell."""

    path: Path | None
    cells: tuple[Cell, ...]
    results: dict[str, dict[str, Any]]

    @property
    def missing(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell_key(cell) not in self.results)

    def rows(self) -> list[dict[str, Any]]:
        """Settings and results of every finished cell."""
        keys = [(cell, cell_key(cell)) for cell in self.cells]
        return [{**cell, **self.results[key]} for cell, key in keys if key in self.results]

    def curves(
        self, y: str, x: str, by: str | None = None, *, relative: bool = False
    ) -> dict[Any, dict[str, list[float]]]:
        """For each value of `by`: x, the mean of y over all else (seeds), and its deviation.

        relative: as shares of the first mean.
        """
        rows = self.rows()
        for name in (x, y, *([by] if by else [])):
            if not rows or name not in rows[0]:
                known = sorted(rows[0]) if rows else []
                raise SettingError(f"no column {name!r} in the sweep; use one of {known}")
        found: dict[Any, dict[str, list[float]]] = {}
        for group in dict.fromkeys(row[by] if by else None for row in rows):
            mine = [row for row in rows if by is None or row[by] == group]
            curve: dict[str, list[float]] = {"x": [], "mean": [], "std": [], "runs": []}
            for value in sorted({row[x] for row in mine}):
                values = np.array([row[y] for row in mine if row[x] == value], float)
                spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
                for name, number in zip(
                    curve, (value, values.mean(), spread, len(values)), strict=True
                ):
                    curve[name].append(float(number))
            if relative:
                first = curve["mean"][0]
                curve["mean"] = [m / first for m in curve["mean"]]
                curve["std"] = [s / first for s in curve["std"]]
            found[group] = curve
        return found

    def plot(self, y: str, x: str, by: str | None = None, *, relative: bool = False) -> Any:
        """A figure of `curves`: a line for each value of `by`, a band of one deviation."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for group, curve in self.curves(y, x, by, relative=relative).items():
            mean, std = np.array(curve["mean"]), np.array(curve["std"])
            label = None if by is None else f"{by} {group}"
            axes.plot(curve["x"], mean, marker="o", label=label)
            axes.fill_between(curve["x"], mean - std, mean + std, alpha=0.2)
        axes.set_xlabel(x)
        axes.set_ylabel(f"{y} / first" if relative else y)
        if by is not None:
            axes.legend()
        return figure

    def __str__(self) -> str:
        done = len(self.cells) - len(self.missing)
        lines = [f"{len(self.cells)} cells, {done} done"]
        lines += [
            f"  {'done' if cell_key(c) in self.results else 'to do'}  {c}" for c in self.cells
        ]
        return "\n".join(lines)


def sweep(
    grid: Cells,
    run: Callable[..., Mapping[str, Any]],
    *,
    out: str | Path | None = None,
    engine: str = "local",
    address: str | None = None,
    dry_run: bool = False,
    progress: bool = True,
) -> Sweep:
    """Call `run(**cell)` for every cell of a grid that is not done yet.

    grid: values by name, of which all combinations are cells, or the cells themselves.
    run: returns a dictionary of JSON values.
    out: a directory in which each finished cell is a file, written whole or not at all; calling
        `sweep` again with it, also after kill -9, does the rest and repeats nothing.
    engine: "local", one cell after the other, or "ray", on the cluster at `address` (by default a
        cluster on this machine). `out` is written by this process alone.
    dry_run: only list the cells and what is done of them.

    >>> def run(depth, seed):
    ...     return {"loss": 1 / depth}
    >>> found = ed.sweep({"depth": [2, 4], "seed": [0, 1]}, run, out="sweep", progress=False)
    >>> len(found.rows()), found.missing
    (4, ())
    """
    cells = cells_of(grid)
    check_engine(engine)
    if dry_run:
        done = {} if out is None or not Run.exists(out) else _results(Path(out), cells)
        return Sweep(None if out is None else Path(out), tuple(cells), done)
    folder = None if out is None else _opened(Path(out), cells)
    results = {} if folder is None else _results(folder, cells)
    todo = [cell for cell in cells if cell_key(cell) not in results]
    work = each(partial(_spread, run), todo, engine, address)
    quiet = not (progress and sys.stderr.isatty())
    for cell, result in track(work, "sweep", total=len(todo), disable=quiet, transient=True):
        key = cell_key(cell)
        results[key] = _plain(cell, result)
        if folder is not None:
            write_json(folder / "cells" / f"{key}.json", {"cell": cell, "result": results[key]})
    found = Sweep(folder, tuple(cells), results)
    if folder is not None and not Run.open(folder).finished:
        Run.open(folder).write_results({"sweep": found.rows()})
    return found


def cells_of(grid: Cells) -> list[Cell]:
    """The cells of a grid, checked."""
    if isinstance(grid, Mapping):
        for name, values in grid.items():
            if isinstance(values, str) or not hasattr(values, "__iter__"):
                raise SettingError(f"grid[{name!r}] is {values!r}; give a list of values")
        values = [list(grid[name]) for name in grid]
        cells = [dict(zip(grid, chosen, strict=True)) for chosen in itertools.product(*values)]
    else:
        cells = [dict(cell) for cell in grid]
    if not cells:
        raise SettingError("the grid has no cells; give every name at least one value")
    seen: set[str] = set()
    for cell in cells:
        key = cell_key(cell)
        if key in seen:
            raise SettingError(f"the cell {cell} is in the grid twice; leave one out")
        seen.add(key)
    return cells


def cell_key(cell: Mapping[str, Any]) -> str:
    """A name for the file of a cell, the same for the same settings in any order."""
    try:
        text = json.dumps(cell, sort_keys=True)
    except TypeError as error:
        raise SettingError(
            f"the cell {dict(cell)} is not JSON ({error}); use numbers, strings and lists"
        ) from error
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _opened(path: Path, cells: list[Cell]) -> Path:
    if not Run.exists(path):
        Run.create(path, {"names": sorted(cells[0])}, kind="sweep")
    run = Run.open(path)
    if run.kind != "sweep":
        raise RunError(f"{path} holds a run of kind {run.kind!r}, not a sweep; use another folder")
    folder = path / "cells"
    folder.mkdir(exist_ok=True)
    remove_leftovers(folder)
    if any(not (folder / f"{cell_key(cell)}.json").exists() for cell in cells):
        # Cells were added to a finished sweep: its summary is no longer whole.
        (path / "results.json").unlink(missing_ok=True)
    return path


def _results(path: Path, cells: list[Cell]) -> dict[str, dict[str, Any]]:
    files = {cell_key(cell): path / "cells" / f"{cell_key(cell)}.json" for cell in cells}
    return {key: read_json(file)["result"] for key, file in files.items() if file.exists()}


def _plain(cell: Cell, result: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(dict(result)))
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"the run of {cell} returned {type(result).__name__} that is not a dictionary of JSON "
            f"values ({error}); return numbers, strings and lists by name"
        ) from error


def _spread(run: Callable[..., Mapping[str, Any]], cell: Cell) -> Mapping[str, Any]:
    return run(**cell)
