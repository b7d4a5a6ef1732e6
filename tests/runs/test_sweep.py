"""Sweeps: every cell once, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from loky import cpu_count
from tests.helpers.training import net, points
from torch.utils.data import DataLoader

import everydepth as ed
from everydepth.errors import (
    DataError,
    EveryDepthError,
    NonFiniteError,
    RunError,
    SettingError,
)
from everydepth.runs import Run
from everydepth.runs.sweep import sweep
from everydepth.training import Callback

GRID = {"depth": [1, 2, 3], "width": [4, 8], "seed": [0, 1]}


def loss(depth: int, width: int, seed: int) -> dict[str, Any]:
    return {"loss": 1 / depth + 1 / width + 0.01 * seed}


def test_a_dry_run_lists_the_cells_and_runs_none(tmp_path: Path) -> None:
    found = sweep(GRID, lambda **_: pytest.fail("ran"), run=tmp_path / "s", dry_run=True)
    assert len(found.cells) == len(found.missing) == 12
    assert "12 cells, 0 done" in str(found)
    assert not (tmp_path / "s").exists()


def test_a_second_call_repeats_nothing_and_runs_what_was_added(tmp_path: Path) -> None:
    ran: list[dict[str, Any]] = []

    def noted(**cell: Any) -> dict[str, Any]:
        ran.append(cell)
        return loss(**cell)

    first = sweep(GRID, noted, run=tmp_path / "s", progress=False)
    assert len(ran) == 12
    again = sweep({**GRID, "depth": [1, 2, 3, 4]}, noted, run=tmp_path / "s", progress=False)
    assert len(ran) == 16
    assert again.rows()[:2] == first.rows()[:2]
    assert len(ed.Run.open(tmp_path / "s").results()["sweep"]) == 16


def test_curves_are_means_over_all_else() -> None:
    found = sweep(GRID, loss, progress=False)
    curves = found.result("loss_by_depth")
    mean, low = curves.arrays["width 4"], curves.arrays["width 4_low"]
    assert curves.x("width 4").tolist() == [1, 2, 3]
    assert mean.tolist() == pytest.approx([1.255, 0.755, 0.25 + 1 / 3 + 0.005])
    assert (mean - low).tolist() == pytest.approx([0.01 / 2**0.5] * 3)
    assert found.plot("loss_by_depth").axes[0].get_xlabel() == "depth"
    assert found.table("cells").column("width") == [row["width"] for row in found.rows()]
    with pytest.raises(SettingError, match="this sweep has no 'acc_by_depth'"):
        found.result("acc_by_depth")


def test_a_failing_cell_loses_nothing(tmp_path: Path) -> None:
    def fails(**cell: Any) -> dict[str, Any]:
        if cell["depth"] == 2:
            raise ZeroDivisionError
        return loss(**cell)

    with pytest.raises(ZeroDivisionError) as failure:
        sweep(GRID, fails, run=tmp_path / "s", progress=False)
    notes = "\n".join(failure.value.__notes__)
    assert "in the cell {'depth': 2, 'width': 4, 'seed': 0}" in notes
    assert f"4 of 12 cells are done, and saved in {tmp_path / 's'}" in notes
    found = sweep(GRID, loss, run=tmp_path / "s", dry_run=True)
    assert len(found.missing) == 8


def test_a_cell_can_be_skipped_and_is_tried_again_next_time(tmp_path: Path) -> None:
    def lacks(depth: int) -> dict[str, Any]:
        if depth == 2:
            raise DataError("no such data")
        return {"loss": depth}

    grid = {"depth": [1, 2, 3]}
    found = sweep(grid, lacks, run=tmp_path / "s", skips=DataError, progress=False)
    assert list(found.skipped.values()) == ["no such data"]
    assert found.missing == ({"depth": 2},)
    assert not ed.Run.open(tmp_path / "s").finished
    again = sweep(grid, lambda depth: {"loss": 0}, run=tmp_path / "s", progress=False)
    assert [row["loss"] for row in again.rows()] == [1, 0, 3]
    assert ed.Run.open(tmp_path / "s").finished


def test_a_cell_has_a_folder_of_its_own_to_continue_from(tmp_path: Path) -> None:
    def counts(depth: int, folder: Path) -> dict[str, Any]:
        file = folder / "count"
        file.write_text(file.read_text() + "x" if file.exists() else "x")
        if file.read_text() == "x":
            raise RuntimeError("cut short")
        return {"tries": len(file.read_text())}

    how: dict[str, Any] = {"run": tmp_path / "s", "folders": True, "progress": False}
    with pytest.raises(RuntimeError, match="cut short"):
        sweep({"depth": [1]}, counts, **how)
    assert sweep({"depth": [1]}, counts, **how).rows() == [{"depth": 1, "tries": 2}]
    empty = sweep({"depth": [2]}, lambda depth, folder: {"there": folder.is_dir()}, **how)
    assert empty.rows()[0]["there"]
    assert len(list((tmp_path / "s" / "work").iterdir())) == 1  # empty ones are removed
    none = sweep({"depth": [2]}, lambda depth, folder: {"none": folder is None}, folders=True)
    assert none.rows()[0]["none"]


def test_several_processes_give_the_same_results_with_one_thread_each(tmp_path: Path) -> None:
    def measured(depth: int, width: int, seed: int) -> dict[str, Any]:
        import torch

        threads = torch.get_num_threads()
        return {**loss(depth, width, seed), "threads": threads, "process": os.getpid()}

    found = sweep(
        GRID, measured, run=tmp_path / "s", engine="processes", processes=2, progress=False
    ).rows()
    alone = sweep(GRID, loss, progress=False).rows()
    assert [{k: v for k, v in row.items() if k in alone[0]} for row in found] == alone
    assert {row["threads"] for row in found} == {1}
    assert os.getpid() not in {row["process"] for row in found}


def test_a_cell_that_fails_in_another_process_is_named_and_the_others_are_kept(
    tmp_path: Path,
) -> None:
    def fails(**cell: Any) -> dict[str, Any]:
        if cell == {"depth": 2, "width": 4, "seed": 0}:
            raise NonFiniteError("depth 3 is NaN", 3)
        return loss(**cell)

    with pytest.raises(EveryDepthError, match="depth 3 is NaN") as failure:
        sweep(GRID, fails, run=tmp_path / "s", engine="processes", processes=1, progress=False)
    notes = "\n".join(failure.value.__notes__)
    assert "in fails" in notes  # the traceback of the other process
    assert "in the cell {'depth': 2, 'width': 4, 'seed': 0}" in notes
    left = sweep(GRID, loss, run=tmp_path / "s", dry_run=True).missing
    assert {"depth": 2, "width": 4, "seed": 0} in left
    assert len(left) == 8


def test_a_process_that_dies_is_reported_and_loses_no_finished_cell(tmp_path: Path) -> None:
    def dies(a: int) -> dict[str, Any]:
        if a == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"x": a}

    grid = {"a": [0, 1, 2]}
    with pytest.raises(RunError, match="a process that ran a cell died"):
        sweep(grid, dies, run=tmp_path / "s", engine="processes", processes=1, progress=False)
    found = sweep(grid, lambda a: {"x": a}, run=tmp_path / "s", progress=False)
    assert [row["x"] for row in found.rows()] == [0, 1, 2]


SCRIPT = """
import sys, time
from pathlib import Path
from everydepth.runs.sweep import sweep
def loss(**cell):
    with open(sys.argv[2], "a") as file:
        file.write(f"{cell}\\n")
    time.sleep(0.05)
    return {"x": 1}
sweep({"a": list(range(12))}, loss, run=sys.argv[1], engine=sys.argv[3], progress=False)
"""


@pytest.mark.parametrize("engine", ["local", "processes"])
def test_after_kill_9_no_finished_cell_is_lost_or_repeated(tmp_path: Path, engine: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    log = tmp_path / "log"
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "s"), str(log), engine]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    killed = subprocess.Popen(command, env=env)
    while not log.exists() or len(log.read_text().splitlines()) < 4:
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    done = len(list((tmp_path / "s" / "cells").glob("[!.]*.json")))
    at_once = 1 if engine == "local" else cpu_count()
    assert 4 - at_once <= done < 12

    def goes_on(**cell: Any) -> dict[str, Any]:
        with log.open("a") as file:
            file.write(f"{cell}\n")
        return {"x": 1}

    sweep({"a": list(range(12))}, goes_on, run=tmp_path / "s", progress=False)
    # Only the cells that were running when the process died have run twice.
    lines = log.read_text().splitlines()
    assert len(set(lines)) == 12
    assert len(lines) <= 12 + 2 * at_once
    assert not sweep({"a": list(range(12))}, loss, run=tmp_path / "s", dry_run=True).missing


LEAVES = pytest.mark.parametrize(
    ("number", "leaves"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)


@LEAVES
def test_a_signal_in_the_only_step_of_a_fit_ends_the_sweep_around_it(
    tmp_path: Path, number: signal.Signals, leaves: type[BaseException]
) -> None:
    class Kill(Callback):
        def on_gradients(self, training: Any) -> None:
            os.kill(os.getpid(), number)

    ran: list[int] = []

    def cell(a: int) -> dict[str, Any]:
        ran.append(a)
        done = ed.fit(net(), points(8), steps=1, callbacks=[Kill()] * (a == 1), progress=False)
        return {"steps": done.steps}

    before = signal.getsignal(number)
    with pytest.raises(leaves):
        sweep({"a": [0, 1, 2]}, cell, run=tmp_path / "s", progress=False)
    assert signal.getsignal(number) is before
    assert ran == [0, 1]
    found = sweep({"a": [0, 1, 2]}, lambda a: {"steps": 0}, run=tmp_path / "s", progress=False)
    assert [row["steps"] for row in found.rows()] == [1, 0, 0]


def test_half_a_trace_is_no_finished_cell(tmp_path: Path) -> None:
    model = net().stream.model

    def batches() -> Any:
        for batch in DataLoader(points(8), 4):
            yield batch
            os.kill(os.getpid(), signal.SIGINT)

    def cell(a: int) -> dict[str, Any]:
        return {"samples": ed.trace(model, batches(), ["cos"], progress=False).samples}

    with pytest.raises(KeyboardInterrupt) as left:
        sweep({"a": [0]}, cell, run=tmp_path / "s", progress=False)
    assert left.value.__notes__ == [f"0 of 1 cells are done, and saved in {tmp_path / 's'}"]
    assert sweep({"a": [0]}, cell, run=tmp_path / "s", dry_run=True).missing


ENDLESS = """
import os, sys, time
from pathlib import Path
import everydepth as ed
from everydepth.training import Callback
from tests.helpers.training import net, points
class Slow(Callback):
    def on_step(self, training):
        time.sleep(0.05)
        Path(sys.argv[2], f"{os.getpid()}").touch()
def cell(a, folder):
    ed.fit(net(), points(8), steps=9999, run=folder / "fit", resume=True, save_every=9999,
           callbacks=[Slow()], progress=False)
ed.sweep({"a": [0, 1, 2]}, cell, run=sys.argv[1], folders=True, progress=False,
         engine=sys.argv[3], **({"processes": 2} if sys.argv[3] == "processes" else {}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("engine", ["local", "processes"])
def test_a_signal_ends_a_sweep_and_all_its_processes_and_each_fit_keeps_its_step(
    tmp_path: Path, engine: str, number: signal.Signals
) -> None:
    seen, run = tmp_path / "seen", tmp_path / "s"
    seen.mkdir()
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
    words = [sys.executable, "-c", ENDLESS, str(run), str(seen), engine]
    started = subprocess.Popen(words, env=env, start_new_session=True)
    while len(list(seen.iterdir())) < (2 if engine == "processes" else 1):
        assert started.poll() is None
        time.sleep(0.02)
    if number == signal.SIGINT:
        os.killpg(started.pid, number)  # as a terminal does
    else:
        os.kill(started.pid, number)
    assert started.wait(60) != 0
    busy = [int(file.name) for file in seen.iterdir()]
    gone, alive = psutil.wait_procs([psutil.Process(p) for p in busy if psutil.pid_exists(p)], 60)
    assert not alive, gone
    kept = [Run.open(folder / "fit").latest() for folder in (run / "work").iterdir()]
    assert len(kept) == len(busy)
    assert all(bool(step) == (number != signal.SIGKILL) for step in kept)


def test_bad_grids_and_results_are_explained(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="is in the grid twice"):
        sweep({"a": [1, 1]}, loss)
    with pytest.raises(SettingError, match="is in the grid twice"):
        sweep([{"a": 1, "b": 2}, {"b": 2, "a": 1}], loss)
    with pytest.raises(SettingError, match="no cells"):
        sweep({"a": []}, loss)
    with pytest.raises(SettingError, match=r"grid\['a'\] is 'xy'; give a list"):
        sweep({"a": "xy"}, loss)
    with pytest.raises(SettingError, match="is not JSON"):
        sweep({"a": [object()]}, loss)
    with pytest.raises(SettingError, match="not a dictionary of JSON values"):
        sweep({"a": [1]}, lambda a: {"x": object()}, progress=False)
    for wrong, message in (
        ({"engine": "slurm"}, "engine='slurm'; use one of local, processes, ray"),
        ({"address": "here:1"}, "address='here:1' with engine='local'; use engine='ray'"),
        ({"processes": 2}, "processes=2 with engine='local'; use engine='processes'"),
        ({"engine": "processes", "processes": 0}, "processes=0; use a whole number of 1 or more"),
    ):
        with pytest.raises(SettingError, match=message):
            sweep({"a": [1]}, loss, **wrong)
    ed.Run.create(tmp_path / "other", {}, kind="train")
    with pytest.raises(RunError, match="of kind 'train', not a sweep"):
        sweep({"a": [1]}, loss, run=tmp_path / "other")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
def test_cells_run_on_ray_as_they_do_here(tmp_path: Path) -> None:
    found = sweep(GRID, loss, run=tmp_path / "s", engine="ray", progress=False)
    assert len(found.rows()) == 12
    assert found.results == sweep(GRID, loss, progress=False).results


def test_a_ray_address_that_does_not_answer_is_reported_at_once(tmp_path: Path) -> None:
    sweep({"depth": [1], "width": [1], "seed": [0]}, loss, run=tmp_path / "s", progress=False)
    grid = {"depth": [1, 9], "width": [1], "seed": [0]}
    with pytest.raises(RunError, match=r"no Ray cluster answers at '127.0.0.1:1' .* check the"):
        sweep(grid, loss, run=tmp_path / "s", engine="ray", address="127.0.0.1:1")
    assert len(sweep(grid, loss, run=tmp_path / "s", dry_run=True).missing) == 1  # nothing is lost
