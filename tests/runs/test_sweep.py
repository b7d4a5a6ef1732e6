"""Sweeps: every cell once, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import everydepth as ed
from everydepth.errors import RunError, SettingError
from everydepth.runs.sweep import sweep

GRID = {"depth": [1, 2, 3], "width": [4, 8], "seed": [0, 1]}


def run(depth: int, width: int, seed: int) -> dict[str, Any]:
    return {"loss": 1 / depth + 1 / width + 0.01 * seed}


def test_a_dry_run_lists_the_cells_and_runs_none(tmp_path: Path) -> None:
    found = sweep(GRID, lambda **_: pytest.fail("ran"), out=tmp_path / "s", dry_run=True)
    assert len(found.cells) == len(found.missing) == 12
    assert "12 cells, 0 done" in str(found)
    assert not (tmp_path / "s").exists()


def test_a_second_call_repeats_nothing_and_runs_what_was_added(tmp_path: Path) -> None:
    ran: list[dict[str, Any]] = []

    def noted(**cell: Any) -> dict[str, Any]:
        ran.append(cell)
        return run(**cell)

    first = sweep(GRID, noted, out=tmp_path / "s", progress=False)
    assert len(ran) == 12
    again = sweep({**GRID, "depth": [1, 2, 3, 4]}, noted, out=tmp_path / "s", progress=False)
    assert len(ran) == 16
    assert again.rows()[:2] == first.rows()[:2]
    assert len(ed.Run.open(tmp_path / "s").results()["sweep"]) == 16


def test_curves_are_means_over_all_else() -> None:
    found = sweep(GRID, run, progress=False)
    curves = found.curves("loss", "depth", "width")
    assert curves[4]["x"] == [1, 2, 3]
    assert curves[4]["mean"] == pytest.approx([1.255, 0.755, 0.25 + 1 / 3 + 0.005])
    assert curves[4]["std"] == pytest.approx([0.01 / 2**0.5] * 3)
    assert found.curves("loss", "depth", "width", relative=True)[8]["mean"][0] == 1.0
    assert found.plot("loss", "depth", "width").axes[0].get_xlabel() == "depth"
    with pytest.raises(SettingError, match="no column 'acc'"):
        found.curves("acc", "depth")


def test_a_failing_cell_loses_nothing(tmp_path: Path) -> None:
    def fails(**cell: Any) -> dict[str, Any]:
        if cell["depth"] == 2:
            raise ZeroDivisionError
        return run(**cell)

    with pytest.raises(ZeroDivisionError):
        sweep(GRID, fails, out=tmp_path / "s", progress=False)
    found = sweep(GRID, run, out=tmp_path / "s", dry_run=True)
    assert len(found.missing) == 8


SCRIPT = """
import sys, time
from pathlib import Path
from everydepth.runs.sweep import sweep
def run(**cell):
    with open(sys.argv[2], "a") as file:
        file.write(f"{cell}\\n")
    time.sleep(0.05)
    return {"x": 1}
sweep({"a": list(range(12))}, run, out=sys.argv[1], progress=False)
"""


def test_after_kill_9_no_finished_cell_is_lost_or_repeated(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    log = tmp_path / "log"
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "s"), str(log)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    killed = subprocess.Popen(command, env=env)
    while not log.exists() or len(log.read_text().splitlines()) < 4:
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    done = len(list((tmp_path / "s" / "cells").glob("[!.]*.json")))
    assert 3 <= done < 12
    subprocess.run(command, env=env, check=True, timeout=250)
    # Only the cell that was running when the process died has run twice.
    lines = log.read_text().splitlines()
    assert len(set(lines)) == 12
    assert len(lines) <= 13
    assert not sweep({"a": list(range(12))}, run, out=tmp_path / "s", dry_run=True).missing


def test_bad_grids_and_results_are_explained(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="is in the grid twice"):
        sweep({"a": [1, 1]}, run)
    with pytest.raises(SettingError, match="is in the grid twice"):
        sweep([{"a": 1, "b": 2}, {"b": 2, "a": 1}], run)
    with pytest.raises(SettingError, match="no cells"):
        sweep({"a": []}, run)
    with pytest.raises(SettingError, match=r"grid\['a'\] is 'xy'; give a list"):
        sweep({"a": "xy"}, run)
    with pytest.raises(SettingError, match="is not JSON"):
        sweep({"a": [object()]}, run)
    with pytest.raises(SettingError, match="not a dictionary of JSON values"):
        sweep({"a": [1]}, lambda a: {"x": object()}, progress=False)
    ed.Run.create(tmp_path / "other", {}, kind="train")
    with pytest.raises(RunError, match="of kind 'train', not a sweep"):
        sweep({"a": [1]}, run, out=tmp_path / "other")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
def test_cells_run_on_ray_as_they_do_here(tmp_path: Path) -> None:
    found = sweep(GRID, run, out=tmp_path / "s", engine="ray", progress=False)
    assert len(found.rows()) == 12
    assert found.results == sweep(GRID, run, progress=False).results


def test_a_ray_address_that_does_not_answer_is_said_at_once(tmp_path: Path) -> None:
    sweep({"depth": [1], "width": [1], "seed": [0]}, run, out=tmp_path / "s", progress=False)
    grid = {"depth": [1, 9], "width": [1], "seed": [0]}
    with pytest.raises(RunError, match=r"no Ray cluster answers at '127.0.0.1:1' .* check the"):
        sweep(grid, run, out=tmp_path / "s", engine="ray", address="127.0.0.1:1")
    assert len(sweep(grid, run, out=tmp_path / "s", dry_run=True).missing) == 1  # nothing is lost
