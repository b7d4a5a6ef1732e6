"""Run a recipe: cells are stored as they finish, so an interrupted one continues where it was."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from everydepth.config import checked
from everydepth.environment import DATA_VARIABLE, machine
from everydepth.errors import DataError, SettingError
from everydepth_papers.evidence.recipe import Cell, Finished, Preset, Recipe
from everydepth_papers.evidence.reproduction import Reproduction
from everydepth_papers.verdict import check_seeds

BUNDLED = ("digits", "surface", "synthetic")


@checked
def reproduce(
    recipe: Recipe,
    preset: str = "smoke",
    *,
    seeds: int | None = None,
    run: str | Path | None = None,
    finished: bool = False,
    earlier: Reproduction | None = None,
    progress: bool = True,
) -> Reproduction:
    """Do the cells of a preset that are not done yet, then compare with the printed figures.

    run: a directory in which every finished cell is a file. The same call again, also after
    kill -9, does the rest and repeats nothing; without it nothing is written.
    finished: do nothing, and compare with what the run has so far; `about` has how many cells
    were planned.
    earlier: a reproduction whose cells need not be done again, such as a recorded one of fewer
    seeds. Those of the same settings and seed are taken as they are, and each keeps the machine
    that it was measured on.

    >>> from everydepth_papers.evidence import find_recipe, reproduce
    >>> recipe, folder = find_recipe("residual_table2")
    >>> found = reproduce(recipe, "smoke", run="run", progress=False)
    >>> found.about["source"], found.rows[0].published is None
    ('Residual Relay, Table 2', False)
    """
    from everydepth.runs import Run
    from everydepth.runs.cells import cell_key
    from everydepth.runs.sweep import sweep
    from everydepth.runs.together import is_main

    chosen = recipe.preset(preset)
    planned = _cells(recipe, chosen, seeds)
    if finished and run is None:
        raise SettingError("finished=True without run=; give a run to read")
    if not finished:
        check_needs(recipe, preset)
        check_memory(recipe, preset)
    known = _known(recipe, earlier)
    todo = [cell for cell in planned if cell_key(cell) not in known]
    if not todo:
        raise SettingError(
            f"all {len(planned)} cells of {recipe.name}, preset {preset}, are in `earlier` "
            "(--recorded); leave it out to do them again, or ask for more seeds"
        )
    work = partial(_work, recipe)
    done = sweep(todo, work, run=run, folders=True, dry_run=finished, progress=progress).done
    known |= {
        cell_key(cell): _finished(cell, **done[cell_key(cell)])
        for cell in todo
        if cell_key(cell) in done
    }
    cells = [cell for cell in planned if cell_key(cell) in known]
    if not cells:
        raise DataError(
            f"{run} has no finished cell of {recipe.name}, preset {preset}; run it first"
        )
    results = tuple(known[cell_key(cell)] for cell in cells)
    count = chosen.seeds if seeds is None else seeds
    more = "" if seeds is None else f" --seeds {seeds}"
    more += " --finished" if finished else ""
    partly = {"planned": len(planned)} if len(cells) < len(planned) else {}
    outcome = Reproduction.of(
        recipe.rows(results),
        results,
        recipe=recipe.name,
        preset=preset,
        title=recipe.title,
        source=recipe.source,
        about=recipe.about,
        command=f"everydepth reproduce {recipe.name} --preset {preset}{more}",
        seeds=count,
        **partly,
        seconds=round(sum(result.seconds for result in results), 1),
        machine=machine(),
    )
    if run is not None and not finished and is_main():
        outcome.save(Path(run) / "reproduction")
        Run.open(run).write_results({"recipe": recipe.name, "preset": preset})
    return outcome


def dry_run(
    recipe: Recipe,
    preset: str,
    *,
    seeds: int | None = None,
    run: str | Path | None = None,
    earlier: Reproduction | None = None,
) -> dict[str, Any]:
    """Describe a preset without running it: cells, model sizes, data, and how to start it."""
    import torch

    from everydepth.runs.cells import cell_key
    from everydepth.runs.sweep import sweep

    chosen = recipe.preset(preset)
    command = f"everydepth reproduce {recipe.name} --preset {preset}"
    cells = _cells(recipe, chosen, seeds)
    known = _known(recipe, earlier)
    found = sweep(cells, lambda **_: {}, run=run, dry_run=True)
    missing = [cell for cell in found.missing if cell_key(cell) not in known]
    sizes: dict[str, int] = {}
    for name, build in chosen.models.items():
        with torch.device("meta"):
            sizes[name] = sum(p.numel() for p in build().parameters())
    return {
        "recipe": recipe.name,
        "preset": preset,
        "cost": chosen.cost,
        "cells": cells,
        "done": len(cells) - len(missing),
        "models": sizes,
        "needs": list(chosen.needs),
        "missing": [need for need in chosen.needs if _missing(need) is not None],
        "memory_gib": chosen.memory_gib,
        "launch": f"{chosen.launch} -m {command}" if chosen.launch else command,
    }


def data_folder(name: str) -> Path:
    """A folder of data or weights under EVERYDEPTH_DATA."""
    why = _missing(name)
    if why is not None:
        raise DataError(why)
    return Path(os.environ[DATA_VARIABLE]) / name


def check_needs(recipe: Recipe, preset: str) -> None:
    """Raise an error that says how to get missing data, before anything starts."""
    reasons = [why for need in recipe.preset(preset).needs if (why := _missing(need)) is not None]
    if reasons:
        smaller = "" if preset == "smoke" else "; the smoke preset needs no data"
        raise DataError(
            f"the preset {preset} of {recipe.name} cannot start: {'; '.join(reasons)}{smaller}"
        )


def check_memory(recipe: Recipe, preset: str) -> None:
    """Raise an error if the largest cell would not fit in memory, before anything starts."""
    import psutil
    import torch

    wanted = recipe.preset(preset).memory_gib
    sizes = [
        torch.cuda.get_device_properties(index).total_memory
        for index in range(torch.cuda.device_count())
    ]
    where = "the largest GPU has" if sizes else "this machine has"
    there = max(sizes) if sizes else psutil.virtual_memory().available
    if wanted * 2**30 > there:
        raise SettingError(
            f"a cell of {recipe.name}, preset {preset}, takes about {wanted:g} GiB, but {where} "
            f"{there / 2**30:.1f} GiB free; use a smaller preset, or a larger machine"
        )


def _cells(recipe: Recipe, preset: Preset, seeds: int | None) -> list[Cell]:
    count = check_seeds(preset.seeds if seeds is None else seeds)
    # Seed by seed, so that what is done of an interrupted recipe compares all settings.
    return [
        {"recipe": recipe.name, **cell, "seed": seed}
        for seed in range(count)
        for cell in preset.cells
    ]


def _finished(cell: Cell, *, values: Mapping[str, Any], seconds: float) -> Finished:
    settings = {name: value for name, value in cell.items() if name not in ("recipe", "seed")}
    return Finished(cell=settings, seed=cell["seed"], values=values, seconds=seconds)


def _known(recipe: Recipe, earlier: Reproduction | None) -> dict[str, Finished]:
    """The cells of an earlier reproduction, by their key."""
    from everydepth.runs.cells import cell_key

    if earlier is None:
        return {}
    if earlier.about["about"] != recipe.about:
        raise SettingError(
            f"the recipe {recipe.name} is described differently since its cells were recorded, so "
            "that they may have been measured in another way; leave `earlier` (--recorded) out"
        )
    where = earlier.about["machine"]
    return {
        cell_key({"recipe": recipe.name, **one.cell, "seed": one.seed}): replace(
            one, machine=one.machine or where
        )
        for one in earlier.finished
    }


def _work(
    measured: Recipe, *, folder: Path | None, recipe: str, seed: int, **settings: Any
) -> dict[str, Any]:
    """One cell; a folder that is kept lets a run that was cut short continue."""
    from everydepth.training.snapshot import kept_random_state

    start = time.perf_counter()
    kept = nullcontext(folder) if folder is not None else TemporaryDirectory()
    with kept as own, kept_random_state():  # a cell may seed as it likes
        values = measured.cell(settings, seed, Path(own))
    return {"values": dict(values), "seconds": time.perf_counter() - start}


def _missing(need: str) -> str | None:
    """Why data is missing and how to get it; None if it is there."""
    if need.split(":")[0] in BUNDLED:
        return None
    if need.startswith("package:"):
        name = need.removeprefix("package:")
        if find_spec(name.replace("-", "_")) is not None:
            return None
        return f"the package {name} is not installed; pip install {name}"
    if need.startswith("hf:") or "/" in need:
        if find_spec("datasets") is None:
            return f"{need} comes from the Hugging Face hub; pip install 'everydepth[data]'"
        return None  # the cache or the network decides, and `load` says so
    root = os.environ.get(DATA_VARIABLE)
    if not root:
        return (
            f"it needs {need}, kept in a folder of that name; set {DATA_VARIABLE} to the folder "
            f"that holds {need}/ (docs/tables.md says where each comes from)"
        )
    if not (Path(root) / need).is_dir():
        return (
            f"it needs {need}, but there is no folder {need} in {root} ({DATA_VARIABLE}); put it "
            "there (docs/tables.md says where each comes from)"
        )
    return None
