"""Sweeps: a function of many settings, as a table that survives the machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from everydepth.errors import RunError, SettingError
from everydepth.runs.cells import (
    Cell,
    Cells,
    Function,
    cell_key,
    cells_of,
    finished_cells,
    run_cells,
)
from everydepth.runs.engine import Engine, check_engine
from everydepth.runs.run import Run
from everydepth.runs.together import is_main, on_main


@dataclass(frozen=True)
class Sweep:
    """The cells of a sweep and what is done of them. Results are plain JSON, one file a cell.

    results, skipped: by key of the cell (`cell_key`); skipped says why.
    """

    path: Path | None
    cells: tuple[Cell, ...]
    results: dict[str, dict[str, Any]]
    skipped: dict[str, str] = field(default_factory=dict)

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
    function: Function,
    *,
    run: str | Path | None = None,
    engine: Engine = "local",
    address: str | None = None,
    processes: int | None = None,
    folders: bool = False,
    skips: type[Exception] | tuple[type[Exception], ...] = (),
    dry_run: bool = False,
    progress: bool = True,
) -> Sweep:
    """Call `function(**cell)` for every cell of a grid that is not done yet.

    grid: values by name, of which all combinations are cells, or the cells themselves.
    function: returns a dictionary of JSON values.
    run: a directory in which each finished cell is a file, written whole or not at all, by this
        process alone; calling `sweep` again with it, also after kill -9, does the rest and repeats
        nothing. When a cell fails, no other is begun, and those that are done are kept.
    engine: "local", one cell after the other; "processes", on as many cores of this machine as
        there are (or `processes`), one compute thread each; "ray", on the cluster at `address` (by
        default a cluster on this machine).
    folders: also pass `folder=`, a directory of the cell's own in which one that was cut short can
        continue; None without `run`.
    skips: errors that leave a cell undone, said in `Sweep.skipped`, and do not end the sweep.
    dry_run: only list the cells and what is done of them.

    >>> def loss(depth, seed):
    ...     return {"loss": 1 / depth}
    >>> found = ed.sweep({"depth": [2, 4], "seed": [0, 1]}, loss, run="sweep", progress=False)
    >>> len(found.rows()), found.missing
    (4, ())
    """
    cells = cells_of(grid)
    check_engine(engine, address, processes)
    folder = None if run is None else Path(run)
    if dry_run:
        done = {} if folder is None else finished_cells(cells, folder).results
        return Sweep(folder, cells, done)
    opened = None if folder is None else on_main(lambda: _opened(folder, cells))
    outcome = run_cells(
        cells,
        function,
        run=opened,
        engine=engine,
        address=address,
        processes=processes,
        folders=folders,
        skips=skips,
        title="sweep",
        progress=progress,
    )
    found = Sweep(folder, cells, outcome.results, outcome.skipped)
    if opened is not None and is_main() and not opened.finished and not found.missing:
        opened.write_results({"sweep": found.rows()})
    return found


def _opened(path: Path, cells: tuple[Cell, ...]) -> Run:
    if not Run.exists(path):
        return Run.create(path, {"names": sorted(cells[0])}, kind="sweep")
    run = Run.open(path)
    if run.kind != "sweep":
        raise RunError(f"{path} holds a run of kind {run.kind!r}, not a sweep; use another folder")
    return run
