"""The run directory: written whole or not at all, and clear about what is wrong with it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from everydepth import files
from everydepth.errors import RunError
from everydepth.runs import Run, checkpoint, held
from everydepth.runs.run import changes
from everydepth.runs.tree import flatten, unflatten


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", {"lr": 0.1, "betas": (0.9, 0.99)})


def parts(value: float = 1.0) -> dict[str, Any]:
    return {"model": {"head.weight": torch.full((2, 3), float(value))}}


def test_a_run_opens_with_what_it_was_created_with(run: Run) -> None:
    again = Run.open(run.path)
    assert again == run
    assert again.config == {"lr": 0.1, "betas": [0.9, 0.99]}
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/opt/bin/everydepth", "train", "-m", "a b"], "everydepth train -m 'a b'"),
        (["/opt/lib/everydepth/__main__.py", "trace", "x"], "everydepth trace x"),
        (["examples/plain.py", "--lr", "1"], "python plain.py --lr 1"),
        (["-c"], ""),
    ],
)
def test_a_run_remembers_the_command_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], command: str
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    run = Run.create(tmp_path / "run", {})
    assert json.loads((run.path / "environment.json").read_text())["command"] == command
    assert "metrics.jsonl" in (run.path / "README.md").read_text()


def test_a_run_never_overwrites_another(run: Run) -> None:
    with pytest.raises(RunError, match="already holds a run; continue it with resume"):
        Run.create(run.path, {})


def test_a_run_never_moves_into_a_directory_in_use(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match="is not an empty directory"):
        Run.create(tmp_path, {})


def test_opening_a_directory_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no run \(no config.json there\)"):
        Run.open(tmp_path)


def test_a_config_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the config of a run must be JSON"):
        Run.create(tmp_path / "run", {"model": object()})
    assert not Run.exists(tmp_path / "run")


@pytest.mark.parametrize("file", ["config.json", "checkpoints/00000001/state.json", "results.json"])
def test_a_newer_format_asks_for_a_newer_version(run: Run, file: str) -> None:
    run.save_checkpoint(1, parts(), {})
    run.write_results({"loss": 1.0})
    path = run.path / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))

    def read_all() -> None:
        opened = Run.open(run.path)
        opened.checkpoint()
        opened.results()

    with pytest.raises(RunError, match=r"has format 99, but this version of everydepth reads up"):
        read_all()


@pytest.mark.parametrize("size", [10**12, 1e12, -1, None, "3"])
def test_a_state_that_claims_more_metrics_than_there_are_is_refused(run: Run, size: Any) -> None:
    run.log({"step": 1})
    before = run.metrics_size()
    with pytest.raises(RunError, match=r"says that .*metrics.jsonl has .* bytes, but it has 12"):
        run.cut_metrics(size)
    assert run.metrics_size() == before


def test_metrics_survive_a_line_torn_by_a_kill(run: Run) -> None:
    run.log({"step": 1})
    size = run.metrics_size()
    run.log({"step": 2})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    assert run.metrics() == [{"step": 1}, {"step": 2}]
    run.cut_metrics(size)
    run.log({"step": 2, "again": True})
    assert run.metrics() == [{"step": 1}, {"step": 2, "again": True}]


def test_a_spoilt_line_in_the_middle_is_an_error(run: Run) -> None:
    (run.path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(RunError, match="has a line that is not JSON"):
        run.metrics()


def test_a_checkpoint_gives_back_every_tensor_and_number(run: Run) -> None:
    state = {"rng": [1, 2], "scheduler": {"last_lr": (0.1, 1e-30)}, "best": float("inf")}
    optimizer = {"state": {0: {"step": torch.tensor(3.0)}, 1: {}}, "groups": [{"betas": (0.9, 1)}]}
    run.save_checkpoint(7, {**parts(), "optimizer": optimizer}, state)
    saved = Run.open(run.path).checkpoint()
    assert saved.step == 7
    assert saved.state == state
    assert torch.equal(saved.load("model")["head.weight"], torch.ones(2, 3))
    assert saved.load("optimizer")["state"][0]["step"].item() == 3.0
    assert saved.load("optimizer")["groups"] == [{"betas": (0.9, 1)}]


def test_a_checkpoint_holds_no_pickle(run: Run) -> None:
    folder = run.save_checkpoint(1, parts(), {})
    assert {file.name for file in folder.iterdir()} == {"model.safetensors", "state.json"}
    assert load_file(folder / "model.safetensors").keys() == {"head.weight"}


def test_tied_weights_are_stored_once_and_come_back_under_both_names(run: Run) -> None:
    weight = torch.randn(4, 2)
    folder = run.save_checkpoint(1, {"model": {"embed": weight, "head": weight}}, {})
    assert load_file(folder / "model.safetensors").keys() == {"embed"}
    loaded = run.checkpoint().load("model")
    assert torch.equal(loaded["head"], weight)
    assert torch.equal(loaded["embed"], weight)


def test_a_view_and_a_transpose_are_stored_by_value(run: Run) -> None:
    base = torch.arange(6.0).view(2, 3)
    run.save_checkpoint(1, {"model": {"a": base, "row": base[1], "turned": base.T}}, {})
    loaded = run.checkpoint().load("model")
    assert torch.equal(loaded["row"], base[1])
    assert torch.equal(loaded["turned"], base.T)


def test_the_last_ones_and_the_best_are_kept(run: Run) -> None:
    for step in (10, 20, 30, 40, 50):
        run.save_checkpoint(step, parts(step), {}, best=step == 20, keep=2)
    assert run.checkpoints() == [20, 40, 50]
    assert (run.latest(), run.best()) == (50, 20)
    assert run.checkpoint(20).load("model")["head.weight"].mean() == 20


def test_a_step_may_be_written_again(run: Run) -> None:
    run.save_checkpoint(1, parts(1), {})
    run.save_checkpoint(1, parts(2), {})
    assert run.checkpoint().load("model")["head.weight"].mean() == 2


def test_a_step_counts_as_saved_when_all_else_about_it_is_written(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before, the run does the step again; killed after, it still knows the best."""
    run.save_checkpoint(1, parts(), {}, best=True)
    written: list[str] = []
    real = files.write_text
    monkeypatch.setattr(
        "everydepth.runs.run.write_text", lambda p, text: (written.append(p.name), real(p, text))
    )
    run.save_checkpoint(2, parts(), {}, best=True)
    assert written == ["best", "latest"]


def test_a_missing_step_lists_those_that_exist(run: Run) -> None:
    with pytest.raises(RunError, match="has no checkpoint yet"):
        run.checkpoint()
    run.save_checkpoint(10, parts(), {})
    with pytest.raises(RunError, match="no checkpoint of step 20; it has 10"):
        run.checkpoint(20)


def test_a_truncated_checkpoint_is_named_with_its_sizes(run: Run) -> None:
    file = run.save_checkpoint(1, parts(), {}) / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 5)
    with pytest.raises(RunError, match=f"is truncated: it has {size - 5} bytes and should have"):
        run.checkpoint()


def test_a_checkpoint_with_spoilt_content_is_named(run: Run) -> None:
    file = run.save_checkpoint(1, parts(), {}) / "model.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)
    with pytest.raises(RunError, match=r"model\.safetensors is damaged: its checksum differs"):
        run.checkpoint().load("model")


def test_a_state_file_that_is_not_json_is_named(run: Run) -> None:
    folder = run.save_checkpoint(1, parts(), {})
    (folder / "state.json").write_text('{"format": 1, "st')
    with pytest.raises(RunError, match=r"state\.json is not JSON"):
        run.checkpoint()


def test_the_error_for_a_damaged_pointer_says_what_to_write_into_it(run: Run) -> None:
    run.save_checkpoint(3, parts(), {})
    (run.path / "checkpoints" / "latest").write_text("newest")
    with pytest.raises(
        RunError, match="holds 'newest', but a step is a whole number; write one of 3"
    ):
        run.checkpoint()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left (os error 28)"),
    ],
)
def test_a_full_disk_leaves_the_previous_checkpoint_intact(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    run.save_checkpoint(1, parts(1), {})

    def half_written(tensors: dict[str, Tensor], path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(checkpoint, "save_file", half_written)
    with pytest.raises(RunError, match=r"the disk is full .* step 2 .* step 1 is intact"):
        run.save_checkpoint(2, parts(2), {})
    assert run.checkpoint().load("model")["head.weight"].mean() == 1
    assert not list((run.path / "checkpoints").glob(f"{files.TEMPORARY}*"))


def test_another_disk_error_is_not_called_a_full_disk(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint, "save_file", fails)
    with pytest.raises(RunError, match=r"could not be written .*: Input/output error; check"):
        run.save_checkpoint(2, parts(), {})


@pytest.mark.parametrize("moment", range(12))
def test_a_crash_at_any_moment_of_saving_leaves_a_whole_checkpoint(
    run: Run, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """A crash before each operation on the disk; some moments come after the last operation."""

    class Crash(BaseException):
        pass

    run.save_checkpoint(1, parts(1), {})
    left = [moment]

    def crashing(name: str) -> None:
        real = getattr(os, name)

        def operation(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                raise Crash
            left[0] -= 1
            return real(*args, **kwargs)

        monkeypatch.setattr(files.os, name, operation)

    with monkeypatch.context() as patch:
        monkeypatch = patch
        crashing("replace")
        crashing("fsync")
        # A killed process cleans nothing up.
        patch.setattr(files.shutil, "rmtree", lambda *a, **k: None)
        try:
            run.save_checkpoint(2, parts(2), {}, keep=1)
            crashed = False
        except Crash:
            crashed = True
    again = Run.open(run.path)
    assert again.latest() in ((1, 2) if crashed else (2,))
    assert again.checkpoint().load("model")["head.weight"].mean() == again.latest()
    again.save_checkpoint(3, parts(3), {}, keep=1)
    assert again.checkpoints() == [3]
    assert not list((run.path / "checkpoints").glob(f"{files.TEMPORARY}*"))


def test_results_come_back_and_mark_the_run_finished(run: Run) -> None:
    assert not run.finished
    with pytest.raises(RunError, match="has no results yet; resume it"):
        run.results()
    run.write_results({"accuracy": [0.5, 0.9]})
    assert run.finished
    assert Run.open(run.path).results() == {"accuracy": [0.5, 0.9]}


def test_a_changed_config_is_listed_setting_by_setting(run: Run) -> None:
    run.check_config({"lr": 0.1, "betas": (0.9, 0.99)})
    with pytest.raises(RunError, match=r"other settings: lr 0\.1 -> 0\.2; clip None -> 1\.0\. Res"):
        run.check_config({"lr": 0.2, "betas": [0.9, 0.99], "clip": 1.0})


def test_changes_reach_into_nested_settings() -> None:
    before = {"objective": {"name": "lpa", "early": 0.1}, "epochs": 3}
    after = {"objective": {"name": "lpa", "early": 0.3}, "epochs": 3}
    assert changes(before, after) == ["objective.early 0.1 -> 0.3"]


def test_a_checkpoint_refuses_what_it_could_only_pickle(run: Run) -> None:
    with pytest.raises(RunError, match=r"model\.f is a function, which a checkpoint cannot hold"):
        run.save_checkpoint(1, {"model": {"model": {"f": lambda: None}}}, {})
    with pytest.raises(RunError, match=r"state holds tensors \(mask\)"):
        run.save_checkpoint(1, {}, {"mask": torch.ones(1)})


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.just("__tuple__")
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=15,
)


@given(trees)
def test_any_tree_survives_json(tree: Any) -> None:
    skeleton, tensors = flatten(tree)
    assert unflatten(json.loads(json.dumps(skeleton)), tensors) == tree


# -- killed, held, damaged ----------------------------------------------------------------------


def test_a_run_killed_at_any_operation_of_its_creation_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    left = 0

    def counted(function: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            return function(*args, **kwargs)

        return counting

    # What a dead process can no longer tidy up stays.
    monkeypatch.setattr(files, "removed_on_error", lambda _: nullcontext())
    for name in ("replace", "open", "fsync", "mkdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    operations = 0
    for operation in range(1, 100):
        left, folder = operation, tmp_path / str(operation)
        try:
            Run.create(folder, {"lr": 1})
        except Killed:
            operations += 1
            left = 0
            with held(folder):
                assert Run.resumed(folder, {"lr": 1}).config == {"lr": 1}
            assert not [entry for entry in folder.iterdir() if entry.name.startswith(".tmp")]
        else:
            break
    assert operations >= 10


def test_a_directory_with_a_readme_of_its_own_is_in_use(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# My project")
    with pytest.raises(RunError, match="is not an empty directory"):
        Run.create(tmp_path, {})


def test_a_run_has_one_writer_and_names_it(tmp_path: Path) -> None:
    mine = rf"in use by process {os.getpid()} on .* since"
    with held(tmp_path / "run"), pytest.raises(RunError, match=mine):
        held(tmp_path / "run").__enter__()
    with held(tmp_path / "run"):  # free again
        pass


@pytest.mark.parametrize("place", [".", "checkpoints", "cells", "sweep"])
def test_what_a_killed_process_left_half_written_goes_at_the_next_start(
    tmp_path: Path, place: str
) -> None:
    left = tmp_path / "run" / place / f"{files.TEMPORARY}measured.npz-1"
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_text("half")
    with held(tmp_path / "run"):
        assert not left.exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_the_lock_gives_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "replace", fails)
    words = rf"the run directory .* cannot be written: {os.strerror(code)}; (free|use)"
    with pytest.raises(RunError, match=words):
        held(tmp_path / "run").__enter__()
    monkeypatch.undo()
    with held(tmp_path / "run"):  # free again
        pass


def test_a_dead_process_holds_nothing(tmp_path: Path) -> None:
    program = (
        "import os, sys, signal; from everydepth.runs import held\n"
        "inside = held(sys.argv[1]); inside.__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "run" / ".holder.json").exists()
    with held(tmp_path / "run"):
        assert Run.create(tmp_path / "run", {}).kind == "train"


@pytest.mark.parametrize("file", ["model.safetensors", "state.json"])
def test_one_flipped_bit_in_a_checkpoint_is_found(run: Run, file: str) -> None:
    path = run.save_checkpoint(1, parts(), {"loss": 0.25}) / file
    content = bytearray(path.read_bytes())
    place = content.index(b"0.25") + 3 if file == "state.json" else len(content) - 1
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match="its checksum differs"):
        run.checkpoint().load("model")
