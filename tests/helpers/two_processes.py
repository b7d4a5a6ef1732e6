"""What each of two processes does, in one launch; every scenario leaves a run directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from tests.helpers import growth
from tests.helpers.processes import in_two
from tests.helpers.sharing import made_once
from tests.helpers.training import digits, gpt2, net, points, vit

import everydepth as ed
from everydepth.data import Points, batches
from everydepth.errors import EveryDepthError, LabelError, RunError, SettingError
from everydepth.runs import together
from everydepth.training import Callback, FitResult, Training

SPARE_PORTS = os.environ.get("SPARE_PORTS", "").split()
# By the moment, which process fails alone; process 0 is the one that holds what others read.
FAILING = {"gradients": 0, "forward": 1, "backward": 1}
SETTINGS: dict[str, Any] = {
    "steps": 6,
    "batch_size": 16,
    # Not Adam: where a gradient is zero but for rounding (the bias of keys), it magnifies noise.
    "optimizer": "sgd",
    "lr": 0.1,
    "clip": 1.0,
    "grad_accumulation": 2,
    "save_every": 2,
    "validate_every": 3,
    "progress": False,
}
OBJECTIVES = {
    "lpa": None,
    "heads": ed.multi_classifier(),
    "pulled": ed.lpa().distilled(),
    "cosine": ed.cosine_regularized(5.0),
}


class Crash(Callback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step(self, training: Training) -> None:
        if training.step == self.step:
            raise InterruptedError


def train(run: Path, *, crash: int | None = None, data: Any = None, **more: Any) -> FitResult:
    """39 test rows: the last batch of validation cannot be dealt out evenly."""
    network = ed.EveryDepth(vit(dropout=0.0), ed.lpa())
    rows = digits(64) if data is None else data
    options: Any = {"callbacks": [Crash(crash)], **SETTINGS, **more}
    return ed.fit(network, rows, digits(39, "test"), run=run, **options)


def text(labeled: slice) -> list[dict[str, torch.Tensor]]:
    """Two batches of four rows, of which the first has labels only in some."""
    ids = torch.randint(0, 20, (2, 4, 8), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0] = -100
    labels[0, labeled] = ids[0, labeled]
    return [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]


def train_text(run: Path, data: Any, objective: Any = None, **more: Any) -> FitResult:
    how: dict[str, Any] = {"steps": 2, "optimizer": "sgd", "lr": 0.1, "log_every": 1, "clip": 1.0}
    network = ed.EveryDepth(gpt2(), objective)
    return ed.fit(network, data, run=run, progress=False, **how, **more)


def written(action: Any, error: type[Exception] | tuple[type[Exception], ...], file: Path) -> None:
    """What an error said that every process must get."""
    try:
        action()
    except error as said:
        file.with_name(f"{file.name}-{PartialState().process_index}").write_text(str(said))


class Sevens(Points):
    """Points of which one, at row 7, cannot be read."""

    def batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        if 7 in indices:
            raise OSError("the file of row 7 is gone")
        return super().batch(indices)


class Failing(Callback):
    """One process fails in step 3, at some moment."""

    def __init__(self, moment: str, process: int) -> None:
        self.moment, self.process = moment, process

    def _fail(self, *_: Any) -> None:
        if PartialState().process_index == self.process:
            raise ValueError(f"failed in {self.moment}")

    def on_gradients(self, training: Training) -> None:
        if training.step == 2 and self.moment == "gradients":
            self._fail()

    def on_step(self, training: Training) -> None:
        if training.step == 2 and self.moment == "forward":
            training.model.register_forward_pre_hook(self._fail)
        if training.step == 2 and self.moment == "backward":
            next(training.model.parameters()).register_hook(self._fail)


def wrong_in_one(folder: Path) -> None:
    """Errors of one process, in its rows or anywhere else, in the first step or later."""
    how: dict[str, Any] = {"batch_size": 4, "steps": 8, "shuffle": False, "progress": False}
    for name, row in (("first", 3), ("later", 13), ("held_out", None)):
        rows, held_out = digits(32), digits(16, "test")
        bad = held_out if row is None else rows
        bad.labels[5 if row is None else row] = 99

        def act(rows: Any = rows, held_out: Any = held_out, where: Path = folder / name) -> None:
            ed.fit(ed.EveryDepth(vit()), rows, held_out, run=where, save_every=1, **how)

        alone(act, folder / f"wrong_{name}")
    unread = points(32)
    data = Sevens(unread.inputs, unread.labels)
    alone(lambda: ed.fit(net(), data, **how), folder / "wrong_unread")
    for moment, process in FAILING.items():
        ways: Any = {"callbacks": [Failing(moment, process)], "save_every": 1, **how}
        run = folder / moment
        alone(lambda: ed.fit(net(), points(32), run=run, **ways), folder / f"wrong_{moment}")  # noqa: B023


def alone(action: Any, file: Path) -> None:
    """What an error of one process said in each, after which they have no group any more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(together, "AGREE", 0.5)
        written(action, (EveryDepthError, OSError, ValueError), file)
    os.environ["MASTER_PORT"] = SPARE_PORTS.pop()
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)


def use_fsdp() -> None:
    os.environ |= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
    }
    AcceleratorState._reset_state()  # pyright: ignore[reportPrivateUsage]


def crashed(run: Path, **more: Any) -> None:
    try:
        train(run, crash=5, **more)
    except InterruptedError:
        return
    raise AssertionError("it should have crashed")


def resumed(folder: Path, kind: str) -> None:
    """With Adam, which has more state to lose."""
    adam = {"optimizer": "adamw", "lr": 0.01}
    train(folder / f"{kind}_adam", **adam)
    crashed(folder / f"{kind}_resumed", **adam)
    train(folder / f"{kind}_resumed", resume=True, **adam)


def grown(folder: Path) -> None:
    """What each process holds at the end."""
    teacher = growth.mlp(7, num_hidden_layers=4, hidden_size=24)
    rows, held_out = (growth.points(teacher, n, seed=s, scale=6.0) for n, s in ((256, 0), (300, 1)))
    settings: dict[str, Any] = {"steps": 10, "rounds": 1, "lr": 3e-3, "progress": False}
    found = ed.grow(growth.mlp(), rows, held_out, **settings, run=folder / "grown")
    assert found.rounds[0].accepted
    torch.save(found.model.state_dict(), folder / f"grown-{PartialState().process_index}")


def made(factory: pytest.TempPathFactory) -> Path:
    """The folder that two processes have filled, and one (`one`): starting them takes longest."""

    def make(place: Path) -> None:
        in_two("-m", "tests.helpers.two_processes", str(place))
        train(place / "one")

    return made_once(factory, "two", make)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    assert PartialState(cpu=True).num_processes == 2
    grown(folder)
    train(folder / "ddp")
    train(folder / "ddp_batches", data=batches(digits(64), 16, shuffle=True))
    resumed(folder, "ddp")
    # An error of the main process is everybody's; nobody waits for the others forever.
    written(lambda: train(folder / "ddp"), RunError, folder / "refused")
    # Process 1 gets rows 1 and 3.
    for name, objective in OBJECTIVES.items():
        train_text(folder / f"text_{name}", text(slice(0, None, 2)), objective)
    nothing, uneven = text(slice(0)), [{"input_ids": torch.zeros(3, 8, dtype=torch.long)}]
    written(lambda: train_text(folder / "no_labels", nothing), LabelError, folder / "unlabeled")
    many = {"grad_accumulation": 2}
    written(lambda: train_text(folder / "un", uneven, **many), SettingError, folder / "uneven")
    wrong_in_one(folder)
    use_fsdp()
    train(folder / "fsdp")
    resumed(folder, "fsdp")
    crashed(folder / "fsdp_to_one")
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
