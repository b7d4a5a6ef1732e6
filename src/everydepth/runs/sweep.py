"""Sweeps: evaluate a function over many settings, resumable after a crash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from everydepth.config import checked, filled
from everydepth.errors import RunError
from everydepth.results import Results, provenance
from everydepth.runs.cells import (
    Cell,
    Cells,
    Function,
    cell_key,
    cells_of,
    finished_cells,
    run_cells,
)
from everydepth.runs.engine import EngineConfig
from everydepth.runs.holding import held
from everydepth.runs.measurements import measurements
from everydepth.runs.run import Run
from everydepth.runs.together import is_main, on_main


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Sweep(Results, kind="sweep"):
    """The cells of a sweep and their outcome, as curves over settings and as rows.

    done: by key of a cell (`cell_key`), its outcome. skipped: why it has none.
    """

    path: Path | None = None
    cells: tuple[Cell, ...] = ()
    done: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cells:  # loaded
            object.__setattr__(self, "cells", tuple(self.about.get("cells", ())))
            object.__setattr__(self, "done", self.about.get("done", {}))
            object.__setattr__(self, "skipped", self.about.get("skipped", {}))

    @classmethod
    def of(
        cls,
        path: Path | None,
        cells: Sequence[Cell],
        done: Mapping[str, Mapping[str, Any]],
        skipped: Mapping[str, str] | None = None,
    ) -> Sweep:
        """From the outcome of every finished cell."""
        facts: dict[str, Any] = {"skipped": skipped} if skipped else {}
        found = cls(
            results={},
            about=provenance(cells=cells, done=done, **facts),
            path=path,
            cells=tuple(cells),
            done=done,
            skipped=skipped or {},
        )
        rows = found.rows()
        return replace(found, results=measurements(rows, cells[0])) if rows else found

    @property
    def missing(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell_key(cell) not in self.done)

    def rows(self) -> list[dict[str, Any]]:
        """Settings and results of every finished cell."""
        keys = [(cell, cell_key(cell)) for cell in self.cells]
        return [{**cell, **self.done[key]} for cell, key in keys if key in self.done]

    def __str__(self) -> str:
        done = len(self.cells) - len(self.missing)
        names = dict.fromkeys(name for cell in self.cells for name in cell)
        vary = [n for n in names if len({str(cell.get(n)) for cell in self.cells}) > 1] or names
        lines = [f"{len(self.cells)} cells, {done} done"]
        for cell in self.cells:
            state = "done " if cell_key(cell) in self.done else "to do"
            settings = "  ".join(f"{name}={cell.get(name)}" for name in vary)
            lines.append(f"  {state}  {settings}")
        return "\n".join(lines)


@checked
def sweep(
    grid: Cells,
    function: Function,
    *,
    run: str | Path | None = None,
    where: EngineConfig | None = None,
    folders: bool = False,
    skips: type[Exception] | tuple[type[Exception], ...] = (),
    dry_run: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Sweep:
    """Call `function(**cell)` for every cell of a grid that is not done yet.

    grid: values by name, whose combinations are the cells, or the cells themselves.
    function: returns a dictionary of JSON values.
    run: a directory with one file per finished cell, written atomically. Calling `sweep` again
        with it, even after kill -9, does the remaining cells and repeats none. If a cell fails, no
        new one starts, and finished ones are kept.
    where, settings: an `EngineConfig`, or its fields by name: `engine="local"`, one cell after the
        other; "processes", on all cores of this machine (or `processes` of them), one compute
        thread each; "ray", on the cluster at `address` (by default a new one on this machine).
    folders: also pass `folder=`, a directory for the cell to save to and resume from; None without
        `run`.
    skips: errors that skip a cell, listed in `Sweep.skipped`, without ending the sweep.
    dry_run: only list the cells and their state.

    >>> def loss(depth, seed):
    ...     return {"loss": 1 / depth}
    >>> found = ed.sweep({"depth": [2, 4], "seed": [0, 1]}, loss, run="sweep", progress=False)
    >>> len(found.rows()), found.missing
    (4, ())
    """
    cells = cells_of(grid)
    place: EngineConfig
    (place,) = filled(settings, "sweep", where or EngineConfig)
    folder = None if run is None else Path(run)
    if dry_run:
        done = {} if folder is None else finished_cells(cells, folder).results
        return Sweep.of(folder, cells, done)
    with ExitStack() as stack:
        opened = None if folder is None else on_main(lambda: _opened(folder, cells, stack))
        outcome = run_cells(
            cells,
            function,
            run=opened,
            where=place,
            folders=folders,
            skips=skips,
            title="sweep",
            progress=progress,
        )
        found = Sweep.of(folder, cells, outcome.results, outcome.skipped)
        if opened is not None and is_main() and not opened.finished and not found.missing:
            found.save(opened.path / "sweep")
            opened.write_results({"sweep": found.rows()})
    return found


def _opened(path: Path, cells: tuple[Cell, ...], stack: ExitStack) -> Run:
    if not Run.exists(path):
        Run.check_free(path)
        stack.enter_context(held(path))
        return Run.create(path, {"names": sorted(cells[0])}, kind="sweep")
    run = Run.open(path)
    if run.kind != "sweep":
        raise RunError(f"{path} holds a run of kind {run.kind!r}, not a sweep; use another folder")
    stack.enter_context(held(path))
    return run
