"""Runs and traces are read whole, and those of a stranger cannot do harm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.helpers.results import curve, trace_of

from everydepth.errors import DataError, RunError
from everydepth.reports.reading import read
from everydepth.results import saving
from everydepth.runs import Run

ACCURACY = curve("accuracy", [0.1, 0.5, 0.9])


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    return trace_of(ACCURACY, depth=2).save(tmp_path / "a trace")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run.create(tmp_path / "a run", {"command": "everydepth train", "lr": 0.1})
    made.log({"step": 1, "loss": 2.0})
    made.write_results({"best": 0.5})
    trace_of(ACCURACY, depth=2).save(made.path / "trace")
    return made


def test_a_saved_trace_is_read_under_the_name_of_its_folder(traced: Path) -> None:
    view = read(traced)
    assert view.name == "a trace"
    assert view.answers["trace"]["accuracy"].tolist() == [0.1, 0.5, 0.9]


def test_a_run_brings_its_results_and_its_history(run: Run) -> None:
    run.log({"step": 2, "loss": 1.0})
    view = read(run.path, "mine")
    assert view.name == "mine"
    assert list(view.answers) == ["trace", "training"]
    assert view.answers["training"]["loss"].tolist() == [2.0, 1.0]
    assert view.config["lr"] == 0.1
    assert "python" in view.environment


def test_a_run_that_goes_on_has_no_results_yet_and_is_still_read(tmp_path: Path) -> None:
    assert not read(Run.create(tmp_path / "new", {}).path).answers


def test_a_link_that_leads_out_of_the_folder_is_not_followed(run: Run) -> None:
    secret = run.path.parent / "secret.json"
    secret.write_text('{"password": 1}')
    for name in ("environment.json", "metrics.jsonl"):
        (run.path / name).unlink()
        (run.path / name).symlink_to(secret)
        with pytest.raises(DataError, match=f"{name} leads out of .*only files inside it are read"):
            read(run.path)
        (run.path / name).unlink()


def test_a_trace_folder_that_is_a_link_is_not_followed_out_of_a_run(
    traced: Path, tmp_path: Path
) -> None:
    made = Run.create(tmp_path / "run", {})
    (made.path / "trace").symlink_to(traced)
    with pytest.raises(DataError, match="leads out"):
        read(made.path)


def test_a_file_beyond_the_limit_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "LARGEST", 10)
    with pytest.raises(DataError, match="MiB, but up to"):
        read(run.path)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
@pytest.mark.parametrize("content", ["[]", "3", '"text"'])
def test_a_run_with_a_file_of_another_kind_is_refused(run: Run, name: str, content: str) -> None:
    (run.path / name).write_text(content + "\n")
    with pytest.raises(RunError, match=rf"{name} (is incomplete|has a line with) .* restore "):
        read(run.path)


def test_a_folder_of_something_else_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds neither a run .* nor results"):
        read(tmp_path)
    with pytest.raises(DataError, match="is not a folder; give a run directory or a folder"):
        read(tmp_path / "nothing")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    with pytest.raises(RunError, match="no format number"):
        read(tmp_path)
