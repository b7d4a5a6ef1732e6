"""Resuming is exact: killed at any moment, a run ends with the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.training import digits, mlp, net, points, same, vit, weights
from torch import Tensor
from torch.optim import SGD, AdamW, lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler
from transformers import ViTForImageClassification

import everydepth as ed
from everydepth.architectures.cifar_resnet import CifarResNet
from everydepth.architectures.cifar_resnet import CifarResNetConfig as ConvConfig
from everydepth.data import batches
from everydepth.errors import RunError
from everydepth.runs import Run
from everydepth.training import Callback, EarlyStopping, Training, UntilAccuracy
from everydepth.training.lora import with_lora

QUIET: dict[str, Any] = {"progress": False}
ROOT = Path(__file__).parents[2]


def command(run: Path, **options: Any) -> list[str]:
    words = [f"{key}={json.dumps(value)}" for key, value in options.items()]
    return [sys.executable, "-m", "tests.helpers.train_digits", str(run), *words]


def start(run: Path, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(run, **options),
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step ") and int(line.split()[1]) >= step:
            return
    assert process.stderr is not None
    pytest.fail(f"the run ended before step {step}: {process.stderr.read()[-2000:]}")


def trained(run: Path) -> dict[str, Tensor]:
    return load_file(run / "model" / "model.safetensors")


OPTIONS: dict[str, Any] = {"steps": 20, "save_every": 4, "validate_every": 7, "log_every": 3}


def test_a_run_killed_in_mid_epoch_and_resumed_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    """SIGKILL between two checkpoints, with dropout, sampled depths, annealing and clipping."""
    whole = tmp_path / "whole"
    uninterrupted(whole)
    killed = tmp_path / "killed"
    process = start(killed, **OPTIONS)
    wait_for_step(process, 10)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not Run.open(killed).finished
    uninterrupted(killed, resume=True)
    assert same(trained(killed), trained(whole))
    lines = [
        [{k: v for k, v in line.items() if k != "seconds"} for line in Run.open(run).metrics()]
        for run in (whole, killed)
    ]
    assert lines[0] == lines[1]


def uninterrupted(run: Path, **more: Any) -> None:
    from tests.helpers.train_digits import main

    main(str(run), OPTIONS | more)


class Signal(Callback):
    """Sends this process a signal in the middle of a step."""

    def __init__(self, number: signal.Signals, step: int) -> None:
        self.number, self.step = number, step

    def on_gradients(self, training: Training) -> None:
        if training.step == self.step - 1:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(
    ("number", "leaves"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_an_interrupted_run_ends_its_step_says_so_and_goes_on_from_there(
    tmp_path: Path,
    number: signal.Signals,
    leaves: type[BaseException],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, before = tmp_path / "run", signal.getsignal(number)
    with pytest.raises(leaves):
        ed.fit(net(), points(), steps=9, run=run, callbacks=[Signal(number, 4)], **QUIET)
    assert signal.getsignal(number) is before
    expected = (
        f"{number.name} at step 4 of 9: saved a checkpoint in {run}; continue with resume=True, or "
        "--resume on the command line\n"
    )
    assert capsys.readouterr().err == expected
    resumed, plain = net(), net()
    more = [Signal(number, 99)]
    ed.fit(resumed, points(), steps=9, run=run, resume=True, callbacks=more, **QUIET)
    ed.fit(plain, points(), steps=9, **QUIET)
    assert same(weights(resumed), weights(plain))


class Stop(Callback):
    """Leaves a run without a word after some step, as a crash would."""

    class Crash(Exception):
        pass

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step(self, training: Training) -> None:
        if training.step == self.step:
            raise Stop.Crash


def crashed_and_resumed(tmp_path: Path, crash: int, make: Any, **settings: Any) -> bool:
    """Whether a run that crashed at a step ends as one that did not."""
    results = []
    for name, steps in (("whole", [None]), ("crashed", [crash, None])):
        for step in steps:
            network, data, more = make()
            callbacks = [*more.pop("callbacks", []), Stop(step)]
            options = settings | more | {"run": tmp_path / name, "callbacks": callbacks} | QUIET
            try:
                ed.fit(network, data, resume=True, **options)
            except Stop.Crash:
                continue
            results.append(weights(network))
    return same(*results)


@pytest.mark.parametrize("crash", [1, 4, 7, 8, 9, 15])
def test_resuming_is_exact_whatever_the_step(tmp_path: Path, crash: int) -> None:
    """Epochs of 4 steps, checkpoints every 3: before, at and after both."""

    def make() -> Any:
        return ed.EveryDepth(vit(), ed.lpa()), digits(32), {}

    assert crashed_and_resumed(tmp_path, crash, make, epochs=4, batch_size=8, save_every=3)


def test_resuming_is_exact_with_a_loader_that_draws_from_its_own_generator(tmp_path: Path) -> None:
    def make() -> Any:
        generator = torch.Generator().manual_seed(3)
        loader = DataLoader(digits(32), batch_size=8, shuffle=True, generator=generator)
        return ed.EveryDepth(vit(), ed.lpa()), loader, {}

    assert crashed_and_resumed(tmp_path, 7, make, epochs=3, save_every=2)


@pytest.mark.parametrize("own", [False, True])
def test_resuming_is_exact_with_a_batch_sampler_that_has_a_generator(
    tmp_path: Path, own: bool
) -> None:
    class Drawn(Sampler[list[int]]):
        def __init__(self, generator: torch.Generator) -> None:
            self.generator = generator

        def __iter__(self) -> Iterator[list[int]]:
            order = torch.randperm(32, generator=self.generator)
            return iter(order.view(4, 8).tolist())

        def __len__(self) -> int:
            return 4

    def make() -> Any:
        rows, generator = digits(32), torch.Generator().manual_seed(3)
        sampler = RandomSampler(rows, generator=generator)
        picks = Drawn(generator) if own else BatchSampler(sampler, 8, drop_last=False)
        loader = DataLoader(rows, batch_sampler=picks)
        return ed.EveryDepth(vit(), ed.lpa()), loader, {}

    assert crashed_and_resumed(tmp_path, 7, make, epochs=3, save_every=2)


def test_resuming_is_exact_with_batches_that_are_augmented(tmp_path: Path) -> None:
    def noisy(batch: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
        noise = torch.randn(batch["pixel_values"].shape, generator=generator)
        return batch | {"pixel_values": batch["pixel_values"] + noise + torch.rand(())}

    def make() -> Any:
        rows = batches(digits(32), 8, shuffle=True, transform=noisy)
        return ed.EveryDepth(vit(), ed.lpa()), rows, {}

    assert crashed_and_resumed(tmp_path, 7, make, epochs=3, save_every=2)


def test_resuming_is_exact_with_data_of_unknown_length(tmp_path: Path) -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter(batches(points(32), 8, shuffle=True))

    def make() -> Any:
        return net(), Stream(), {}

    assert crashed_and_resumed(tmp_path, 6, make, steps=11, save_every=4)


def test_resuming_is_exact_with_an_optimizer_and_a_scheduler_of_torch(tmp_path: Path) -> None:
    def make() -> Any:
        network = net()
        optimizer = SGD(network.parameters(), lr=0.1, momentum=0.9)
        scheduler = lr_scheduler.StepLR(optimizer, 3)
        return network, points(), {"optimizer": optimizer, "schedule": scheduler}

    assert crashed_and_resumed(tmp_path, 7, make, steps=9, save_every=2)


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_resuming_is_exact_with_a_rate_for_every_group(tmp_path: Path, kind: Any) -> None:
    def make() -> Any:
        network = net()
        first, *rest = network.parameters()
        rest[-1].requires_grad_(False)
        groups = [{"params": [first], "lr": kind(0.1)}, {"params": rest, "lr": kind(0.01)}]
        return network, points(), {"optimizer": AdamW(groups)}

    assert crashed_and_resumed(tmp_path, 7, make, steps=9, save_every=2)


def test_resuming_is_exact_with_adapters_and_dropout_in_mid_epoch(tmp_path: Path) -> None:
    def make() -> Any:
        adapted = with_lora(vit(), rank=2, lora_dropout=0.2)
        return ed.EveryDepth(adapted, ed.layerskip()), digits(32), {}

    assert crashed_and_resumed(tmp_path, 7, make, steps=9, batch_size=8, save_every=3)


def test_resuming_is_exact_with_the_statistics_of_batch_norms(tmp_path: Path) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        config = ConvConfig(widths=(4, 8), blocks_per_stage=(2, 2), num_channels=1, num_labels=10)
        return ed.EveryDepth(CifarResNet(config), ed.lpa()), digits(32), {}

    assert crashed_and_resumed(tmp_path, 7, make, steps=9, batch_size=8, save_every=3)


def test_a_run_goes_on_compiled_or_not(tmp_path: Path) -> None:
    """A compiled model has the names of the plain one in checkpoints and in the model's folder."""
    run, plain = tmp_path / "run", ed.EveryDepth(vit())
    ed.fit(plain, digits(32), steps=4, **QUIET)
    how: dict[str, Any] = {"steps": 4, "save_every": 1, "run": run} | QUIET
    compiled = ed.EveryDepth(torch.compile(vit(), backend="eager"))
    with pytest.raises(Stop.Crash):
        ed.fit(compiled, digits(32), callbacks=[Stop(2)], **how)
    resumed = ed.EveryDepth(vit())
    ed.fit(resumed, digits(32), resume=True, callbacks=[Stop(None)], **how)
    assert same(weights(resumed), weights(plain))
    again = ed.EveryDepth(torch.compile(vit(seed=3), backend="eager"))
    again.load_state_dict(resumed.state_dict())
    assert same(weights(again), weights(resumed))
    again.save_pretrained(tmp_path / "saved")
    for folder in (run / "model", tmp_path / "saved"):
        assert same(weights(ViTForImageClassification.from_pretrained(folder)), weights(resumed))


def test_resuming_is_exact_with_the_optimizer_of_the_crashed_call(tmp_path: Path) -> None:
    network = net()
    optimizer = SGD(network.parameters(), lr=0.1)
    how: dict[str, Any] = {"steps": 9, "save_every": 2, "run": tmp_path / "run"} | QUIET
    with pytest.raises(Stop.Crash):
        ed.fit(network, points(), optimizer=optimizer, callbacks=[Stop(7)], **how)
    ed.fit(network, points(), optimizer=optimizer, callbacks=[Stop(None)], resume=True, **how)
    whole = net()
    ed.fit(whole, points(), steps=9, optimizer=SGD(whole.parameters(), lr=0.1), **QUIET)
    assert same(weights(network), weights(whole))


def test_early_stopping_and_callbacks_go_on_where_they_were(tmp_path: Path) -> None:
    goals: list[UntilAccuracy] = []

    def make() -> Any:
        goals.append(UntilAccuracy(digits(16)))
        network = ed.EveryDepth(vit(), ed.lpa())
        return network, digits(16), {"callbacks": [goals[-1]]}

    rule = EarlyStopping(patience=4, min_delta=1e9)
    settings = {"epochs": 9, "batch_size": 8, "valid": digits(16), "early_stopping": rule}
    assert crashed_and_resumed(tmp_path, 7, make, **settings)
    assert goals[0].accuracy == goals[2].accuracy
    results = [Run.open(tmp_path / name).results() for name in ("whole", "crashed")]
    assert results[0]["stopped"] == results[1]["stopped"]
    assert results[0]["stopped"].startswith("early stopping")


def test_resuming_a_finished_run_trains_no_further(tmp_path: Path) -> None:
    first, again = net(), net(seed=1)
    done = ed.fit(first, points(), points(), steps=3, run=tmp_path / "run", **QUIET)
    result = ed.fit(again, points(), points(), steps=3, run=tmp_path / "run", resume=True, **QUIET)
    assert same(weights(first), weights(again))
    assert result.valid == done.valid


def test_resuming_where_there_is_nothing_starts(tmp_path: Path) -> None:
    assert ed.fit(net(), points(), steps=2, run=tmp_path / "new", resume=True, **QUIET).steps == 2


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(Stop.Crash):
        ed.fit(net(), points(), steps=4, run=run, callbacks=[Stop(1)], **QUIET)
    (run / "checkpoints" / "latest").unlink()
    resumed = net()
    ed.fit(resumed, points(), steps=4, run=run, resume=True, callbacks=[Stop(None)], **QUIET)
    plain = net()
    ed.fit(plain, points(), steps=4, **QUIET)
    assert same(weights(resumed), weights(plain))


def test_the_initial_weights_are_those_of_the_run(tmp_path: Path) -> None:
    """Also where the script that resumes builds its model from another seed."""
    run, plain = tmp_path / "run", net()
    ed.fit(plain, points(), steps=4, **QUIET)
    with pytest.raises(Stop.Crash):
        ed.fit(net(), points(), steps=4, run=run, callbacks=[Stop(1)], **QUIET)
    other = net(seed=7)
    ed.fit(other, points(), steps=4, run=run, resume=True, callbacks=[Stop(None)], **QUIET)
    assert same(weights(other), weights(plain))


def test_changed_settings_are_listed_and_nothing_is_lost(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ed.fit(net(), points(), steps=3, lr=0.01, run=run, **QUIET)
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(
        RunError, match=r"steps 3 -> 9; lr 0\.01 -> 0\.1; objective\.parts"
    ) as error:
        ed.fit(net(ed.lpa(early=0.5)), points(), steps=9, lr=0.1, run=run, resume=True, **QUIET)
    assert "'early': 0.5}]. Resume it with the original settings" in str(error.value)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ed.fit(net(), points(), steps=1, run=run, **QUIET)
    config = json.loads((run / "config.json").read_text())
    wider = ed.EveryDepth(mlp(hidden_size=16), ed.lpa())
    config["config"]["model"]["parameters"] = sum(p.numel() for p in wider.parameters())
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        RunError, match=r"belongs to another model: its embed\.weight has shape \(8, 4\)"
    ):
        ed.fit(wider, points(), steps=1, run=run, resume=True, **QUIET)


def test_a_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ed.fit(net(), points(), steps=1, run=run, **QUIET)
    file = run / "checkpoints" / "00000001" / "optimizer.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(RunError, match=r"optimizer\.safetensors is truncated: it has"):
        ed.fit(net(), points(), steps=1, run=run, resume=True, **QUIET)


def test_other_callbacks_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ed.fit(net(), points(), steps=1, run=run, **QUIET)
    with pytest.raises(RunError, match="started with 0 callbacks and is resumed with 1"):
        ed.fit(net(), points(), steps=1, run=run, resume=True, callbacks=[Stop(None)], **QUIET)
