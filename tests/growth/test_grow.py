"""Growing: what is kept, what is carried over, and what survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers import two_processes
from tests.helpers.growth import SETTINGS, long_growth, mlp, points, teacher_data
from tests.helpers.processes import ROOT
from tests.zoo import ENTRIES
from torch import nn
from torch.optim import SGD, AdamW

import everydepth as ed
from everydepth.architectures.residual_mlp import ResidualMLP
from everydepth.errors import BatchError, RunError, SettingError
from everydepth.growth import carried, grow, paired
from everydepth.growth.losses import mean_loss
from everydepth.growth.optimizers import counterparts
from everydepth.growth.trainer import repeatable, train_plainly


def batches_of(rows: int) -> list[dict[str, torch.Tensor]]:
    return repeatable(teacher_data(rows, 0), ed.as_stream(mlp()), 32)


def same(a: nn.Module, b: nn.Module) -> bool:
    states = a.state_dict(), b.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(v, states[1][k]) for k, v in states[0].items()
    )


def test_a_model_grows_where_the_data_asks_for_it() -> None:
    model, train, valid = mlp(), teacher_data(512, 0), teacher_data(400, 1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = grow(model, train, valid, **SETTINGS)
    assert found.rounds[0].accepted
    accepted = sum(r.accepted for r in found.rounds)
    assert ed.as_stream(found.model).depth == found.depth == 2 + accepted
    assert mean_loss(found.model, teacher_data(400, 2)) < mean_loss(model, teacher_data(400, 2))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    first = found.rounds[0]
    assert first.held_out.gain == pytest.approx(first.valid["old"] - first.valid[first.safe])
    assert first.gamma >= 0
    assert "by held-out loss: " in str(found)


def test_a_post_norm_model_grows_and_its_checkpoint_has_it(tmp_path: Path) -> None:
    model, _ = ENTRIES["Bert-SequenceClassification"].make()

    def rows(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 60, (192, 6), generator=generator)
        # One class: the mean gradient points to it at every site.
        return {"input_ids": ids, "labels": torch.ones(192, dtype=torch.long)}

    settings = {**SETTINGS, "rounds": 1}
    found = grow(model, rows(0), rows(1), run=tmp_path / "run", **settings)
    assert found.rounds[0].accepted
    assert found.depth == 5
    assert found.rounds[0].valid["trained"] < found.rounds[0].valid["old"]
    # The stock class would put the norms back, so no folder claims to be the model.
    assert not (tmp_path / "run" / "model").exists()


def test_a_model_that_draws_its_own_labels_is_the_deepest() -> None:
    model = mlp()
    found = grow(model, points(model, 256, seed=5), points(model, 128, seed=6), **SETTINGS)
    assert not any(r.accepted for r in found.rounds)
    assert same(found.model, model)


def test_what_only_fits_the_training_rows_is_not_kept() -> None:
    """Labels that are noise: the training loss falls, the held-out loss does not."""
    model = mlp()
    train, valid = points(model, 96), points(model, 400, seed=1)
    train["labels"], valid["labels"] = (
        torch.randint(0, 3, v["labels"].shape) for v in (train, valid)
    )
    found = grow(model, train, valid, steps=150, rounds=1, alpha=0.999, lr=1e-2, progress=False)
    assert found.rounds[0].train["trained"] < found.rounds[0].train["old"]
    assert found.rounds[0].paper == "trained"
    assert found.rounds[0].safe == "old"
    assert same(found.model, model)


def test_the_papers_rule_keeps_what_trains_better_whatever_held_out_rows_say() -> None:
    model, train = mlp(), teacher_data(512, 0)
    valid = {**teacher_data(200, 1)}
    valid["labels"] = valid["labels"].roll(1, 0)  # nothing can be learned for these
    settings = {**SETTINGS, "rounds": 1}
    safe, paper = (grow(model, train, valid, select=s, **settings) for s in ("held-out", "paper"))
    assert safe.rounds[0].kept == safe.rounds[0].safe == "old"
    assert paper.rounds[0].kept == paper.rounds[0].paper != "old"
    assert (safe.depth, paper.depth) == (2, 3)


def test_trains_new_changes_only_the_new_block() -> None:
    model, train, valid = mlp(), teacher_data(512, 0), teacher_data(400, 1)
    found = grow(model, train, valid, **{**SETTINGS, "rounds": 1}, trains="new")
    assert found.rounds[0].accepted
    grown = found.model.state_dict()
    old, new = ed.as_stream(model), ed.as_stream(found.model)
    for name, there in counterparts(old, new, found.rounds[0].after).items():
        assert torch.equal(model.state_dict()[name], grown[there])
    assert all(p.requires_grad for p in found.model.parameters())


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_the_optimizer_keeps_every_bit_it_knew(kind: type[torch.optim.Optimizer]) -> None:
    model = mlp()
    more = {"momentum": 0.9} if kind is SGD else {}
    blocks, rest = (
        list(model.blocks.parameters()),
        [*model.embed.parameters(), *model.head.parameters()],
    )
    groups = [{"params": rest, "lr": 0.01}, {"params": blocks, "lr": 0.02}]
    optimizer = kind(groups, lr=0.1, **more)
    train_plainly(ed.as_stream(model), batches_of(64), optimizer, 5, batch_size=32, seed=0)
    big = ed.insert(model, 1)
    old, new = ed.as_stream(model), ed.as_stream(big)
    copied = carried(optimizer, old, new, 1)
    there = dict(big.named_parameters())
    for name, twin in counterparts(old, new, 1).items():
        before, now = (
            optimizer.state[dict(model.named_parameters())[name]],
            copied.state[there[twin]],
        )
        assert before.keys() == now.keys()
        assert before
        for key, value in before.items():
            assert torch.equal(value, now[key])
            assert value.data_ptr() != now[key].data_ptr()
    assert [g["lr"] for g in copied.param_groups] == [0.01, 0.02]
    assert len(copied.param_groups[1]["params"]) == len(blocks) + 4
    train_plainly(new, batches_of(64), copied, 1, batch_size=32, seed=0)


def test_a_foreign_optimizer_is_refused() -> None:
    model, other = mlp(), mlp(1)
    streams = ed.as_stream(model), ed.as_stream(ed.insert(model, 1))
    with pytest.raises(SettingError, match="do not belong to the network"):
        carried(AdamW(other.parameters()), *streams, 1)


class Stopped(Exception):
    pass


def test_a_growth_that_was_cut_off_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    model, train, valid, test = mlp(), *(teacher_data(n, i) for i, n in enumerate((512, 400, 99)))
    # With this seed the second round has something to do as well.
    settings = {**SETTINGS, "alpha": 0.5, "batch_size": 32, "seed": 1}
    calls = 0

    def fit(m: nn.Module, data: Any, optimizer: Any, steps: int, folder: Path | None) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise Stopped
        train_plainly(ed.as_stream(m), data, optimizer, steps, batch_size=64, seed=calls % 2)

    whole = grow(model, train, valid, test, **settings, run=tmp_path / "whole", fit=fit)
    assert calls == 2
    with pytest.raises(Stopped):
        grow(model, train, valid, test, **settings, run=tmp_path / "cut", fit=fit)
    calls = 1
    again = grow(model, train, valid, test, **settings, run=tmp_path / "cut", resume=True, fit=fit)
    assert calls == 2
    # Rounds share the allowed error of the held-out rows.
    allowed = [1 - r.held_out.confidence for r in whole.rounds]
    assert allowed == pytest.approx([0.05 / 2, 0.05 / 6])
    assert same(again.model, whole.model)
    assert whole.held_out is not None
    assert whole.held_out.rows == len(test["labels"])
    assert again.held_out == whole.held_out
    assert [r.after for r in again.rounds] == [r.after for r in whole.rounds]
    loaded = ResidualMLP.from_pretrained(tmp_path / "cut" / "model")
    assert same(loaded, whole.model)
    assert len(ed.Results.load(tmp_path / "cut" / "growth")["valid_loss"]) == len(whole.rounds)
    with pytest.raises(RunError, match="other settings: steps 20 -> 21"):
        grow(model, train, valid, **{**settings, "steps": 21}, run=tmp_path / "cut", resume=True)
    with pytest.raises(RunError, match="already holds a run"):
        grow(model, train, valid, **settings, run=tmp_path / "cut")


# Between the checkpoint of step 50 and the next.
KILLED = """
import os, signal, sys
from pathlib import Path
from everydepth.runs import Run
from tests.helpers import two_processes
from tests.helpers.growth import long_growth

def log(run, entry, own=Run.log):
    own(run, entry)
    if entry["step"] == 60:
        os.kill(os.getpid(), signal.SIGKILL)

Run.log = log
long_growth(Path(sys.argv[1]))
"""


def test_after_kill_9_inside_a_round_the_training_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "cut")]
    killed = subprocess.run(command, env=env, cwd=ROOT, timeout=240, check=False)
    assert killed.returncode == -signal.SIGKILL
    saved = tmp_path / "cut" / "rounds" / "001" / "checkpoints" / "latest"
    assert int(saved.read_text()) == 50
    whole, cut = long_growth(tmp_path / "whole"), long_growth(tmp_path / "cut")
    assert ed.as_stream(whole).depth == 3
    assert same(whole, cut)
    rounds = [ed.Results.load(tmp_path / r / "growth").about["rounds"] for r in ("whole", "cut")]
    for entry in (*rounds[0], *rounds[1]):
        del entry["seconds"]
    assert rounds[0] == rounds[1]
    assert not saved.parents[2].exists()


def test_growth_stops_at_a_depth_and_says_why() -> None:
    model, train, valid = mlp(), teacher_data(512, 0), teacher_data(400, 1)
    found = grow(model, train, valid, **{**SETTINGS, "rounds": None}, max_depth=3)
    assert found.stopped == "reached depth 3 of at most 3"


def test_bad_settings_say_what_is_allowed() -> None:
    model, data = mlp(), points(mlp(), 16)
    for wrong, message in (
        ({"trains": "head"}, "trains='head'; use one of all, new"),
        ({"steps": -1}, "steps=-1; use a whole number of 0 or more"),
        ({"tries": 0}, "tries=0; use a whole number of 1 or more"),
        ({"rounds": -1}, "rounds=-1; use a whole number of 0 or more"),
        ({"confidence": 0.2}, "confidence=0.2; use a number above 0.5 and below 1"),
        ({"alpha": 1.0}, "alpha=1.0; use a number above 0 and below 1"),
        ({"lr": 0.0}, "lr=0.0; use a number above 0"),
        ({"resume": True}, "resume=True without run="),
    ):
        with pytest.raises(SettingError, match=message):
            grow(model, data, data, **wrong)
    with pytest.raises(BatchError, match="an interval needs 2 or more"):
        paired(model, model, points(model, 1))


def test_a_paired_interval_covers_the_true_difference() -> None:
    from everydepth.growth.held_out import paired_losses

    torch.manual_seed(0)
    covered = detected = 0
    for _ in range(100):
        old = torch.rand(200, dtype=torch.float64)
        new = old - 0.1 + 0.2 * (torch.rand(200, dtype=torch.float64) - 0.5)
        counts = torch.randint(1, 4, (200,)).double()
        found = paired_losses((old * counts, counts), (new * counts, counts))
        covered += found.bootstrap[0] <= 0.1 <= found.bootstrap[1]
        detected += found.bernstein[0] <= found.bootstrap[0] and found.better
    assert covered >= 88
    assert detected == 100


def test_two_processes_grow_the_same_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = two_processes.made(tmp_path_factory)
    first, second = (torch.load(folder / f"grown-{rank}") for rank in (0, 1))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert ed.Run.open(folder / "grown").finished


@pytest.mark.parametrize(("grown", "after"), [(False, 1), (True, 3), (True, -1)])
def test_an_optimizer_is_carried_only_to_the_model_that_was_grown(grown: bool, after: int) -> None:
    model = mlp()
    new = ed.as_stream(ed.insert(model, 1) if grown else model)
    with pytest.raises(SettingError, match=r"has 2 blocks, the grown .* after=.*pass the model"):
        carried(AdamW(model.parameters()), ed.as_stream(model), new, after)
