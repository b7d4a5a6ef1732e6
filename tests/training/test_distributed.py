"""Two processes on this machine (gloo): DDP and FSDP give what one process gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers import training as small
from tests.helpers import two_processes
from tests.helpers.processes import launch
from tests.helpers.training import same
from tests.helpers.two_processes import FAILING, OBJECTIVES, text, train, train_text
from torch import Tensor
from transformers import ViTForImageClassification

from everydepth.data import batches
from everydepth.runs import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_processes.made(tmp_path_factory)


def trained(run: Path) -> dict[str, Tensor]:
    return load_file(run / "model" / "model.safetensors")


def assert_close(a: Path, b: Path) -> None:
    found, expected = trained(a), trained(b)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_equal_one_with_the_same_global_batch(folder: Path, kind: str) -> None:
    assert_close(folder / kind, folder / "one")
    ours, theirs = Run.open(folder / kind).results(), Run.open(folder / "one").results()
    assert ours["valid"]["accuracy"] == pytest.approx(theirs["valid"]["accuracy"])
    assert ours["valid"]["loss"] == pytest.approx(theirs["valid"]["loss"], abs=1e-5)


def test_batches_from_an_iterable_are_dealt_out_by_rows(folder: Path, tmp_path: Path) -> None:
    train(tmp_path / "one", data=batches(small.digits(64), 16, shuffle=True))
    assert_close(folder / "ddp_batches", tmp_path / "one")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_that_crashed_resume_exactly(folder: Path, kind: str) -> None:
    assert same(trained(folder / f"{kind}_resumed"), trained(folder / f"{kind}_adam"))


def test_a_checkpoint_of_fsdp_goes_on_in_one_process(folder: Path) -> None:
    run = folder / "fsdp_to_one"
    assert not Run.open(run).finished
    train(run, resume=True)
    assert_close(run, folder / "one")


def test_a_model_trained_with_fsdp_is_a_plain_one(folder: Path) -> None:
    loaded = ViTForImageClassification.from_pretrained(folder / "fsdp" / "model")
    checkpoint = Run.open(folder / "fsdp").checkpoint().load("model")
    assert same(dict(loaded.state_dict()), checkpoint)


def test_an_error_of_the_main_process_reaches_all(folder: Path) -> None:
    for process in (0, 1):
        assert "already holds a run" in (folder / f"refused-{process}").read_text()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_process_may_have_no_label_in_a_first_batch(
    name: str, folder: Path, tmp_path: Path
) -> None:
    run = folder / f"text_{name}"
    alone = train_text(tmp_path / "one", text(slice(0, None, 2)), OBJECTIVES[name])
    assert_close(run, tmp_path / "one")
    for ours, expected in zip(Run.open(run).metrics(), alone.history, strict=True):
        assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-5)


def test_a_first_batch_without_labels_in_all_processes_is_refused_by_all(folder: Path) -> None:
    for process in (0, 1):
        assert "the data has no labels" in (folder / f"unlabeled-{process}").read_text()


@pytest.mark.parametrize("name", ["first", "later", "held_out"])
def test_a_wrong_label_that_one_process_finds_ends_all(name: str, folder: Path) -> None:
    first, second = ((folder / f"wrong_{name}-{n}").read_text() for n in (0, 1))
    assert first.startswith("another process of this job, which ended, said LabelError: label 99")
    assert second.startswith("label 99, but the head of ViTForImageClassification has 10 classes")


def test_a_step_that_one_process_cannot_take_changes_nothing(folder: Path) -> None:
    """Row 13 is of the fourth step."""
    assert Run.open(folder / "later").latest() == 3


def test_a_row_that_one_process_cannot_read_ends_all(folder: Path) -> None:
    assert (folder / "wrong_unread-1").read_text() == "the file of row 7 is gone"
    assert "said OSError: the file of row 7 is gone" in (folder / "wrong_unread-0").read_text()


@pytest.mark.parametrize(("moment", "process"), FAILING.items())
def test_whatever_fails_in_one_process_ends_all(moment: str, process: int, folder: Path) -> None:
    theirs, its = ((folder / f"wrong_{moment}-{n}").read_text() for n in (1 - process, process))
    assert f"failed in {moment}" in its
    assert theirs.startswith("another process of this job, which ended, said ")
    assert f"failed in {moment}" in theirs
    assert Run.open(folder / moment).latest() == 2  # what it failed in changed nothing


def test_pieces_that_only_some_processes_could_make_are_refused_by_all(folder: Path) -> None:
    for process in (0, 1):
        said = (folder / f"uneven-{process}").read_text()
        assert "a batch of 3 rows cannot be divided into 2 pieces on each of 2 processes" in said


@pytest.mark.slow
def test_the_command_line_trains_under_accelerate_launch(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [
        "train",
        "-m",
        "vit-tiny",
        "-d",
        "digits",
        "--blocks",
        "2",
        "--steps",
        "4",
        "--max-samples",
        "64",
        "--run",
    ]
    finished = launch("-m", "everydepth", *words, str(run))
    assert finished.stdout.count("finished after 4 steps") == 1
    assert Run.open(run).results()["steps"] == 4
