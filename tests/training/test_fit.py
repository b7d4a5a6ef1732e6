"""The built-in loop: the same as a loop by hand, whatever it is given, and clear when it fails."""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.tracking import GeneralTracker
from rich.console import Console
from tests.helpers.training import digits, gpt2, mlp, net, points, same, vit, weights
from tests.zoo import CAUSAL
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import ViTForImageClassification

import everydepth as ed
from everydepth.data import Tokens, batches
from everydepth.errors import (
    BatchError,
    DataError,
    LabelError,
    NonFiniteError,
    RunError,
    SettingError,
)
from everydepth.objectives import Normalized, Objective
from everydepth.runs import Run
from everydepth.training import (
    Callback,
    Cosine,
    EarlyStopping,
    FitConfig,
    MultiStep,
    OneCycle,
    RunConfig,
    Training,
    UntilAccuracy,
    Warmup,
    processes,
)
from everydepth.training.cost import cost_of
from everydepth.training.progress import Display, shown_depths

QUIET: dict[str, Any] = {"progress": False}


def test_fit_equals_a_loop_by_hand_bit_for_bit() -> None:
    data = points()
    trained, by_hand = net(), net()
    ed.fit(trained, batches(data, 16), epochs=2, lr=0.01, schedule="constant", **QUIET)
    parameters = list(by_hand.parameters())
    optimizer = AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    for _ in range(2):
        for batch in batches(data, 16):
            by_hand(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same(weights(trained), weights(by_hand))


def test_training_lowers_the_loss_of_every_depth() -> None:
    network = net()
    result = ed.fit(network, points(), points(seed=1), epochs=10, lr=0.01, batch_size=16, **QUIET)
    first = next(line for line in result.history if "valid" in line)["valid"]["loss"]
    assert all(last < before for last, before in zip(result.valid["loss"], first, strict=True))
    assert result.stopped == "finished"
    assert (result.steps, result.epochs) == (40, 10)


class Listed(Dataset[dict[str, Tensor]]):
    """An ordinary map-style data set, not one of ours."""

    def __init__(self, size: int) -> None:
        self.data = points(size)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.data[index]


@pytest.mark.parametrize("kind", ["rows", "dataset", "loader", "batches", "list", "workers"])
def test_data_may_come_in_any_form(kind: str) -> None:
    data = points(32)
    forms: dict[str, Any] = {
        "rows": data,
        "dataset": Listed(32),
        "workers": Listed(32),
        "loader": DataLoader(Listed(32), batch_size=8, shuffle=True),
        "batches": batches(data, 8, shuffle=True),
        "list": list(batches(data, 8)),
    }
    size = {} if kind == "list" else {"batch_size": 8}
    workers = 1 if kind == "workers" else 0
    result = ed.fit(net(), forms[kind], epochs=2, workers=workers, **size, **QUIET)
    assert result.steps == 8


class Streamed(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (points(32)[index] for index in range(32))


@pytest.mark.parametrize(
    ("data", "asked", "why"),
    [
        (DataLoader(Listed(32), batch_size=8), {"batch_size": 16}, "batch_size=16, but DataLoader"),
        (DataLoader(Listed(32), batch_size=8), {"batch_size": 32}, "batch_size=32, but DataLoader"),
        (DataLoader(Listed(32), batch_size=8), {"shuffle": True}, "shuffle=True, but DataLoader"),
        (DataLoader(Listed(32), shuffle=True), {"shuffle": False}, "shuffle=False, but DataLoader"),
        (DataLoader(Listed(32), batch_size=8), {"workers": 2}, "workers=2, but DataLoader"),
        (batches(points(32), 8), {"batch_size": 4}, "batch_size=4, but Batches yields batches"),
        (list(batches(points(32), 8)), {"batch_size": 4}, "batch_size=4, but list yields"),
        (list(batches(points(32), 8)), {"config": FitConfig(steps=1, shuffle=False)}, None),
        (DataLoader(Listed(32)), {"config": FitConfig(steps=1, batch_size=4)}, "batch_size=4, but"),
        (Streamed(), {"shuffle": True}, "shuffle=True, but Streamed yields rows in a fixed order"),
        (Streamed(), {"workers": 1}, "workers=1, but Streamed"),
        (Streamed(), {"batch_size": 8}, None),
    ],
)
def test_a_batch_size_order_or_workers_that_data_ignores_are_refused(
    data: Any, asked: dict[str, Any], why: str | None
) -> None:
    steps = {} if "config" in asked else {"steps": 1}
    if why is None:
        assert ed.fit(net(), data, **steps, **asked, **QUIET).steps == 1
        return
    with pytest.raises(SettingError, match=why):
        ed.fit(net(), data, **steps, **asked, **QUIET)


def test_a_generator_trains_for_as_long_as_it_lasts() -> None:
    ours, theirs = net(), net()
    ed.fit(ours, (batch for batch in batches(points(32), 8)), steps=4, **QUIET)
    ed.fit(theirs, list(batches(points(32), 8)), steps=4, **QUIET)
    assert same(weights(ours), weights(theirs))


def test_rows_and_a_data_set_of_the_same_rows_train_the_same() -> None:
    ours, theirs = net(), net()
    ed.fit(ours, points(32), steps=6, batch_size=8, **QUIET)
    ed.fit(theirs, Listed(32), steps=6, batch_size=8, **QUIET)
    assert same(weights(ours), weights(theirs))


def test_the_order_is_a_function_of_the_seed() -> None:
    first, again, other = net(), net(), net()
    for network, seed in ((first, 1), (again, 1), (other, 2)):
        ed.fit(network, points(), steps=5, batch_size=8, seed=seed, **QUIET)
    assert same(weights(first), weights(again))
    assert not same(weights(first), weights(other))


@pytest.mark.parametrize("task", ["numbers", "classes", "tokens"])
def test_accumulating_pieces_changes_nothing(task: str) -> None:
    """To 1e-5: the pieces are summed in another order. Padding makes the pieces unequal."""

    def network() -> ed.EveryDepth:
        if task == "numbers":
            return net()
        if task == "classes":
            return ed.EveryDepth(vit(dropout=0.0), ed.lpa(), class_weights=[1.0] * 5 + [3.0] * 5)
        return ed.EveryDepth(gpt2(), ed.lpa())

    data: Any = {"numbers": points(), "classes": digits(64), "tokens": padded_texts()}[task]
    whole, pieces = network(), network()
    for one, count in ((whole, 1), (pieces, 3)):
        ed.fit(one, data, steps=3, batch_size=16, optimizer="sgd", grad_accumulation=count, **QUIET)
    for key, value in weights(whole).items():
        torch.testing.assert_close(weights(pieces)[key], value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("unlabeled", [slice(0, 0), slice(6, 8)])
def test_accumulating_pieces_changes_no_gradient_of_the_cosine_term(unlabeled: slice) -> None:
    ids = torch.randint(0, 20, (8, 8), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:4, :5] = labels[unlabeled] = -100

    def trained(pieces: int) -> dict[str, Tensor]:
        per_word = [1.0 + i % 5 for i in range(20)]
        network = ed.EveryDepth(gpt2(), ed.cosine_regularized(5.0), class_weights=per_word)
        data = [{"input_ids": ids, "labels": labels}]
        ed.fit(network, data, steps=1, optimizer="sgd", grad_accumulation=pieces, **QUIET)
        return weights(network)

    whole, pieces = trained(1), trained(4)
    for key, value in whole.items():
        torch.testing.assert_close(pieces[key], value, atol=1e-6, rtol=1e-5)


def test_a_first_piece_without_labels_is_trained_on_and_a_whole_batch_is_refused() -> None:
    ids = torch.randint(0, 20, (8, 8), generator=torch.Generator().manual_seed(0))
    how: dict[str, Any] = {"steps": 1, "grad_accumulation": 4} | QUIET
    labels = ids.clone()
    labels[:2] = -100
    network = ed.EveryDepth(gpt2())
    before = weights(network)
    ed.fit(network, [{"input_ids": ids, "labels": labels}], **how)
    assert not same(weights(network), before)
    nothing = [{"input_ids": ids, "labels": torch.full_like(ids, -100)}]
    with pytest.raises(LabelError, match="the data has no labels: all are -100"):
        ed.fit(ed.EveryDepth(gpt2()), nothing, **how)


@pytest.mark.filterwarnings("ignore:the last depth .* has weight 0")
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    "objective",
    [
        ed.weighted([0.0, 1.0, 0.0]).annealed(),
        ed.weighted([0.0, 1.0, 0.0]).annealed() + Normalized(),
    ],
    ids=["annealed", "normalized"],
)
def test_steps_at_which_no_depth_has_a_weight_change_nothing(
    objective: Objective, chunked: bool
) -> None:
    ids = torch.randint(0, 20, (8, 8), generator=torch.Generator().manual_seed(0))
    network = ed.EveryDepth(gpt2(), objective, any_depth_loss=chunked)
    seen: list[dict[str, Tensor]] = []

    class Watch(Callback):
        def on_step(self, training: Training) -> None:
            seen.append(weights(training.net))

    optimizer = SGD(network.parameters(), lr=0.1)
    how: dict[str, Any] = {"optimizer": optimizer, "callbacks": [Watch()]}
    result = ed.fit(network, [{"input_ids": ids}], steps=10, log_every=1, **how, **QUIET)
    assert [line["loss"] == 0 for line in result.history] == [False] * 8 + [True] * 2
    assert not same(seen[6], seen[7])
    assert same(seen[7], seen[9])


def padded_texts() -> Any:
    from everydepth.data import Tokens

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 20, (32, 8), generator=generator)
    mask = (torch.arange(8) < torch.randint(2, 9, (32, 1), generator=generator)).long()
    return Tokens(ids, mask, labels=ids.masked_fill(mask == 0, -100))


def test_a_language_model_reports_perplexity_at_every_depth() -> None:
    network = ed.EveryDepth(gpt2(), ed.lpa())
    scores = ed.fit(network, padded_texts(), padded_texts(), steps=2, **QUIET).valid
    assert scores["perplexity"] == pytest.approx([math.exp(loss) for loss in scores["loss"]])
    assert len(scores["accuracy"]) == 2


def test_validation_agrees_with_the_plain_model_at_the_last_depth() -> None:
    network, data = ed.EveryDepth(vit(), ed.lpa()), digits(100)
    scores = ed.fit(network, data, data, steps=3, **QUIET).valid
    with torch.no_grad():
        plain = network.model.eval()(pixel_values=data.pixel_values, labels=data.labels)
    assert scores["loss"][-1] == pytest.approx(plain.loss.item(), rel=1e-5)
    hits = (plain.logits.argmax(-1) == data.labels).float().mean().item()
    assert scores["accuracy"][-1] == pytest.approx(hits)


def test_validation_scores_a_multi_classifier_by_its_own_heads() -> None:
    network, data = ed.EveryDepth(vit(), ed.multi_classifier()), digits(50)
    scores = ed.fit(network, data, data, steps=1, **QUIET).valid
    with torch.no_grad():
        logits = network.eval()(pixel_values=data.pixel_values, depths=[1]).logits_at[1]
    loss = nn.functional.cross_entropy(logits, data.labels).item()
    assert scores["loss"][0] == pytest.approx(loss, rel=1e-5)


def test_validation_does_not_change_the_training() -> None:
    watched, alone = ed.EveryDepth(vit(), ed.lpa()), ed.EveryDepth(vit(), ed.lpa())
    loader = DataLoader(digits(40), batch_size=20, shuffle=True)
    ed.fit(watched, digits(40), loader, steps=4, validate_every=1, batch_size=8, **QUIET)
    ed.fit(alone, digits(40), steps=4, batch_size=8, **QUIET)
    assert same(weights(watched), weights(alone))


# -- optimizers and schedules ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("schedule", ["constant", "cosine", "one_cycle", "multi_step"])
def test_every_optimizer_and_schedule_trains(name: Any, schedule: Any) -> None:
    result = ed.fit(
        net(), points(), steps=4, optimizer=name, schedule=schedule, lr=0.01, warmup=2, **QUIET
    )
    assert result.history[-1]["loss"] < 10


def rates_of_torch(scheduler: Any, optimizer: Any, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_schedules_agree_with_those_of_torch() -> None:
    steps = 40
    for ours, make in (
        (Cosine(), lambda o: lr_scheduler.CosineAnnealingLR(o, steps)),
        (Cosine(final=0.1), lambda o: lr_scheduler.CosineAnnealingLR(o, steps, eta_min=0.1)),
        (OneCycle(), lambda o: lr_scheduler.OneCycleLR(o, 1.0, steps, cycle_momentum=False)),
        (MultiStep(), lambda o: lr_scheduler.MultiStepLR(o, [20, 30])),
    ):
        optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        expected = rates_of_torch(make(optimizer), optimizer, steps)
        found = [ours.factor(step, steps) for step in range(steps)]
        assert found == pytest.approx(expected, abs=1e-9), ours


@pytest.mark.parametrize("steps", [50, 100, 200, 300, 1000])
def test_a_milestone_falls_on_its_step_despite_rounding(steps: int) -> None:
    for percent in range(1, 100):
        schedule = MultiStep(milestones=(percent / 100,))
        step = -(-percent * steps // 100)
        assert schedule.factor(step - 1, steps) == 1
        assert schedule.factor(step, steps) == 0.1


def test_a_warm_up_rises_linearly_and_then_follows_the_schedule() -> None:
    schedule = Warmup(steps=4, after=Cosine())
    assert [schedule.factor(step, 12) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert schedule.factor(4, 12) == 1.0
    assert schedule.factor(8, 12) == pytest.approx(0.5)


def test_a_warm_up_that_is_a_fraction_leaves_a_step_at_the_full_rate() -> None:
    for steps in (1, 2, 3):
        result = ed.fit(net(), points(), steps=steps, lr=0.5, warmup=0.99, log_every=1, **QUIET)
        assert [line["lr"] for line in result.history][-1] == 0.5


def test_milestones_beyond_the_training_are_refused() -> None:
    with pytest.raises(SettingError, match="use fractions of all steps, from 0 to 1: epoch 30"):
        MultiStep(milestones=(30.0, 60.0))


def test_the_learning_rate_that_is_used_is_logged() -> None:
    result = ed.fit(
        net(), points(), steps=10, lr=0.5, optimizer="sgd", warmup=0.2, log_every=1, **QUIET
    )
    rates = [line["lr"] for line in result.history]
    assert rates[:2] == [0.25, 0.5]
    assert rates[6] == pytest.approx(0.25)


def test_an_optimizer_and_a_scheduler_may_be_objects() -> None:
    network = net()
    optimizer = SGD(network.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    ed.fit(network, points(), steps=4, optimizer=optimizer, schedule=scheduler, **QUIET)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_an_optimizer_keeps_its_learning_rates_however_training_ends(error: Any) -> None:
    class Fail(Callback):
        def on_step(self, training: Training) -> None:
            if error is not None and training.step == 3:
                raise error

    network = net()
    first, *others = network.parameters()
    optimizer = SGD([{"params": [first], "lr": 0.1}, {"params": others, "lr": 0.2}])
    for _ in range(2):
        how: dict[str, Any] = {"optimizer": optimizer, "callbacks": [Fail()], "log_every": 1}
        if error is None:
            history = ed.fit(network, points(), steps=4, **how, **QUIET).history
            assert history[0]["lr"] == 0.1
            assert history[-1]["lr"] < 0.02
        else:
            with pytest.raises(error):
                ed.fit(network, points(), steps=4, **how, **QUIET)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def test_weight_decay_leaves_out_biases_and_norms() -> None:
    network = net(norm=True)
    for parameter in network.parameters():
        nn.init.constant_(parameter, 1.0)
    frozen = [{"inputs": torch.zeros(1, 4), "labels": torch.zeros(1, 2)}]
    seen: dict[str, float] = {}

    class Decay(Callback):
        def on_gradients(self, training: Training) -> None:
            for group in training.optimizer.param_groups:
                for parameter in group["params"]:
                    seen[str(parameter.ndim)] = group["weight_decay"]

    ed.fit(network, frozen, steps=1, weight_decay=0.3, callbacks=[Decay()], **QUIET)
    assert seen == {"1": 0.0, "2": 0.3}


def test_clipping_bounds_the_gradient_and_logs_its_norm() -> None:
    class Norm(Callback):
        norms: list[float]

        def on_step(self, training: Training) -> None:
            assert training.grad_norm is not None
            self.norms = [training.grad_norm]

    network, watch = net(), Norm()
    before = weights(network)
    ed.fit(
        network,
        points(),
        steps=1,
        optimizer="sgd",
        weight_decay=0.0,
        lr=1.0,
        schedule="constant",
        clip=1e-3,
        callbacks=[watch],
        **QUIET,
    )
    moved = sum((v - before[k]).square().sum() for k, v in weights(network).items()) ** 0.5
    assert moved.item() == pytest.approx(1e-3, rel=1e-2)
    assert watch.norms[0] > 1e-3


def test_bf16_trains_and_keeps_the_weights_in_fp32() -> None:
    network = ed.EveryDepth(vit(dropout=0.0), ed.lpa())
    result = ed.fit(network, digits(40), digits(20), steps=3, precision="bf16", **QUIET)
    assert math.isfinite(result.valid["loss"][-1])
    assert {p.dtype for p in network.parameters()} == {torch.float32}


# Dynamo looks at the gradients of what it compiles, and is warned by torch.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_train_the_same_and_are_plain_again_afterwards() -> None:
    plain, compiled = (ed.EveryDepth(vit(dropout=0.0), ed.lpa()) for _ in range(2))
    ed.fit(plain, digits(), steps=2, **QUIET)
    ed.fit(compiled, digits(), steps=2, compile="eager", **QUIET)
    for key, value in weights(plain).items():
        torch.testing.assert_close(weights(compiled)[key], value, atol=1e-6, rtol=1e-5)
    assert all("forward" not in vars(block.module) for block in compiled.stream.blocks)


# -- stopping and callbacks ------------------------------------------------------------------------


def test_early_stopping_stops_and_says_why() -> None:
    result = ed.fit(
        net(),
        points(16),
        points(16, seed=9),
        epochs=50,
        lr=0.3,
        batch_size=8,
        early_stopping=EarlyStopping(patience=2, min_delta=1e9),
        **QUIET,
    )
    assert result.epochs == 3
    assert result.stopped.startswith("early stopping: loss at depth 3 did not improve in 2")
    assert result.best_step == 2


def test_early_stopping_may_watch_a_metric_that_rises_at_a_depth() -> None:
    rule = EarlyStopping(patience=1, metric="accuracy", depth=1, min_delta=1.0)
    network = ed.EveryDepth(vit(), ed.lpa())
    result = ed.fit(network, digits(40), digits(20), epochs=9, early_stopping=rule, **QUIET)
    assert "accuracy at depth 1" in result.stopped


def test_training_until_it_knows_all_reports_what_it_reached() -> None:
    easy = digits(8)
    goal = UntilAccuracy(easy)
    network = ed.EveryDepth(vit(dropout=0.0), ed.lpa())
    result = ed.fit(
        network, easy, epochs=200, lr=0.01, schedule="constant", callbacks=[goal], **QUIET
    )
    assert goal.reached
    assert result.epochs < 200
    assert result.callbacks["UntilAccuracy"]["accuracy"][-1] == 1.0
    assert "reached the target 1.0" in result.stopped


def test_watching_until_it_knows_all_notes_when_and_goes_on() -> None:
    easy = digits(8)
    goal = UntilAccuracy(easy, target=0.5, stop=False, also=digits(100))
    network = ed.EveryDepth(vit(dropout=0.0), ed.lpa())
    how = {"lr": 0.01, "schedule": "constant", "callbacks": [goal], **QUIET}
    result = ed.fit(network, easy, epochs=30, **how)
    assert result.epochs == 30
    first = result.callbacks["UntilAccuracy"]["first"]
    assert goal.accuracy[first["epoch"] - 1] >= 0.5
    assert all(before < 0.5 for before in goal.accuracy[: first["epoch"] - 1])
    assert 0 < first["also"] < 1


def test_training_that_does_not_get_there_says_not_reached() -> None:
    goal = UntilAccuracy(digits(100))
    result = ed.fit(
        ed.EveryDepth(vit(), ed.lpa()), digits(100), epochs=2, callbacks=[goal], **QUIET
    )
    assert result.stopped == "finished"
    assert result.callbacks["UntilAccuracy"]["reached"] is False
    assert len(result.callbacks["UntilAccuracy"]["accuracy"]) == 2


def test_callbacks_hear_of_every_moment_and_can_log_and_stop() -> None:
    class Ears(Callback):
        def __init__(self) -> None:
            self.heard: list[str] = []

        def on_start(self, training: Training) -> None:
            self.heard.append("start")

        def on_gradients(self, training: Training) -> None:
            assert all(p.grad is not None for p in training.model.parameters())

        def on_step(self, training: Training) -> None:
            self.heard.append(f"step {training.step}")
            assert training.losses.keys() == {1, 2, 3}

        def on_validation(self, training: Training) -> None:
            self.heard.append("validation")

        def on_epoch(self, training: Training) -> None:
            self.heard.append("epoch")
            training.log({"gradient": 1.0})
            training.stop("heard enough")

        def on_end(self, training: Training) -> None:
            self.heard.append("end")

    ears = Ears()
    result = ed.fit(net(), points(16), points(8), epochs=9, batch_size=8, callbacks=[ears], **QUIET)
    assert ears.heard == ["start", "step 1", "step 2", "validation", "epoch", "end"]
    assert result.stopped == "heard enough"
    assert {"step": 2, "epoch": 0, "gradient": 1.0} in result.history


class Waits(TorchDispatchMode):
    """Counts how often a number is read from a tensor: on a GPU each is a wait."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_step_waits_for_the_device_once(pieces: int) -> None:
    counts = []
    for steps in (4, 9):
        with Waits() as waits:
            options = {"optimizer": "sgd", "clip": 1.0, "grad_accumulation": pieces, **QUIET}
            # Within one epoch: to start one, torch's loader draws a number.
            ed.fit(net(), points(), steps=steps, batch_size=6, log_every=100, **options)
        counts.append(waits.count)
    assert counts[1] - counts[0] == 5


def test_the_losses_of_a_step_are_read_when_they_are_asked_for() -> None:
    seen: list[dict[int, float]] = []

    class Look(Callback):
        def on_step(self, training: Training) -> None:
            seen.append(training.losses)
            assert training.losses is seen[-1]

    result = ed.fit(net(), points(), steps=3, log_every=1, callbacks=[Look()], **QUIET)
    logged = [line["losses"] for line in result.history if "losses" in line]
    assert [{str(d): v for d, v in losses.items()} for losses in seen] == logged


# -- the run directory -----------------------------------------------------------------------------


def test_a_run_holds_metrics_results_and_a_model_that_loads_without_us(tmp_path: Path) -> None:
    network = ed.EveryDepth(vit(), ed.lpa())
    result = ed.fit(network, digits(40), digits(20), epochs=2, run=tmp_path / "run", **QUIET)
    run = Run.open(tmp_path / "run")
    assert result.path == run.path
    assert run.metrics() == json.loads(json.dumps(result.history))
    assert run.results()["valid"]["accuracy"] == list(result.valid["accuracy"])
    assert run.config["objective"] == ed.lpa().to_json()
    assert run.best() == result.best_step
    loaded = ViTForImageClassification.from_pretrained(run.path / "model")
    assert same(weights(loaded), weights(network.model))
    assert not [file for file in run.path.rglob("*") if file.suffix in (".pt", ".pkl", ".bin")]


def test_a_run_in_use_is_not_overwritten(tmp_path: Path) -> None:
    ed.fit(net(), points(), steps=1, run=tmp_path / "run", **QUIET)
    with pytest.raises(RunError, match="already holds a run; continue it with resume"):
        ed.fit(net(), points(), steps=1, run=tmp_path / "run", **QUIET)


def test_trackers_get_every_metric_by_depth() -> None:
    class Memory(GeneralTracker):
        name = "memory"
        requires_logging_directory = False
        tracker = None

        def __init__(self) -> None:
            super().__init__()
            self.lines: list[tuple[int | None, dict[str, Any]]] = []
            self.config: dict[str, Any] = {}

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self.config = values

        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            self.lines.append((step, values))

    memory = Memory()
    ed.fit(net(), points(), points(), steps=2, log_every=1, trackers=[memory], **QUIET)
    assert memory.config["objective/name"] == "lpa"
    step, values = memory.lines[0]
    assert step == 1
    assert {"loss", "losses/1", "losses/3", "lr"} <= values.keys()
    assert "valid/loss/3" in memory.lines[-1][1]


def test_tensorboard_files_are_written_into_the_run(tmp_path: Path) -> None:
    ed.fit(net(), points(), steps=2, run=tmp_path / "run", trackers="tensorboard", **QUIET)
    assert list((tmp_path / "run").rglob("events.out.tfevents*"))


def test_trackers_that_cannot_run_are_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with pytest.raises(SettingError, match=r"there is no tracker 'wanbd'; choose from .*wandb"):
        ed.fit(net(), points(), steps=1, run=run, trackers="wanbd", **QUIET)
    monkeypatch.setattr(processes, "get_available_trackers", list)
    with pytest.raises(SettingError, match="'wandb' is not installed; `pip install wandb`"):
        ed.fit(net(), points(), steps=1, run=run, trackers=["wandb"], **QUIET)
    assert not run.exists()

    class Broken(GeneralTracker):
        name = "broken"
        requires_logging_directory = False
        tracker = None

        def start(self) -> None:
            raise ConnectionError("no server at 10.0.0.1")

    with pytest.raises(SettingError, match="a tracker did not start: no server"):
        ed.fit(net(), points(), steps=1, run=run, trackers=[Broken()], **QUIET)
    assert not run.exists()
    assert ed.fit(net(), points(), steps=1, run=run, **QUIET).steps == 1
    with pytest.raises(SettingError, match="a tracker did not start: no server"):
        ed.fit(net(), points(), steps=1, run=run, resume=True, trackers=[Broken()], **QUIET)
    assert Run.open(run).latest() == 1  # what was there before stays


def test_columns_of_padding_are_left_out_of_a_batch() -> None:
    model, batch = CAUSAL["Llama-tied-CausalLM-right"].make()
    ids = torch.cat([batch["input_ids"], torch.zeros_like(batch["input_ids"])], 1)
    mask = torch.ones_like(ids)
    mask[:, batch["input_ids"].shape[1] :] = 0
    padded = Tokens(ids, mask, labels=ids.masked_fill(mask == 0, -100))
    widths: list[int] = []
    ed.as_stream(model)  # is looked at once, by its own forward
    model.register_forward_pre_hook(
        lambda _, __, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    ed.fit(model, padded, steps=1, **QUIET)
    assert widths == [batch["input_ids"].shape[1]]


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "epochs=None and steps=None; give one of the two"),
        ({"epochs": 1, "steps": 1}, "epochs=1 and steps=1; give one of the two"),
        ({"steps": 0}, "steps=0; use a whole number of 1 or more"),
        ({"steps": 2.5}, "steps=2.5; use a whole number of 1 or more"),
        ({"steps": 1, "batch_size": 0}, "batch_size=0; use a whole number"),
        ({"steps": 1, "lr": -1.0}, "lr=-1.0; use a number above 0"),
        ({"steps": 1, "lr": math.inf}, "lr=inf; use a number above 0"),
        ({"steps": 1, "log_every": 0}, "log_every=0; use a whole number of 1 or more"),
        ({"steps": 1, "resume": "yes"}, "resume='yes'; use True or False"),
        ({"steps": 1, "optimizer": "adm"}, "optimizer='adm'; use one of adamw, adam, sgd, or an"),
        ({"steps": 1, "schedule": "cos"}, "schedule='cos'; use one of constant, cosine"),
        ({"steps": 4, "warmup": 9}, "warmup steps: 9, training steps: 4; use fewer"),
        ({"steps": 1, "warmup": 1}, "warmup steps: 1, training steps: 1; use fewer"),
        ({"steps": 9, "warmup": 2.5}, "warmup=2.5; use whole steps, or a fraction below 1"),
        (
            {"steps": 5, "warmup": 2, "schedule": Warmup(steps=3, after=Cosine())},
            "warmup steps: 3, training steps: 3; use fewer",
        ),
        ({"steps": 1, "epochs": 0}, "epochs=0; use a whole number of 1 or more"),
        ({"steps": 1, "clip": 0}, "clip=0.0; use a number above 0"),
        ({"steps": 1, "precision": "fp8"}, "precision='fp8'; use one of fp32, bf16"),
        ({"steps": 1, "early_stopping": 1}, "early_stopping without validation data"),
        ({"steps": 1, "resume": True}, "resume=True without run="),
        ({"steps": 1, "seed": -1}, "seed=-1; use a whole number of 0 or more"),
        ({"epoch": 1}, "fit has no setting 'epoch'. Did you mean 'epochs'"),
        ({"steps": 1, "save_evry": 1}, "fit has no setting 'save_evry'. Did you mean 'save_every'"),
    ],
)
def test_a_setting_that_makes_no_sense_is_an_error(settings: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        ed.fit(net(), points(), **settings, **QUIET)


def test_settings_change_a_copy_of_the_config() -> None:
    config = FitConfig(steps=2, lr=0.5, optimizer="sgd", schedule="constant")
    where = RunConfig(progress=False, log_every=1)
    result = ed.fit(net(), points(), None, config, where=where, lr=0.25)
    assert [line["lr"] for line in result.history] == [0.25, 0.25]
    assert config.lr == 0.5


def test_a_model_or_its_stream_is_trained_as_an_EveryDepth_of_it() -> None:
    found = []
    for wrap in (ed.EveryDepth, ed.as_stream, lambda model: model):
        torch.manual_seed(0)
        model = mlp()
        ed.fit(wrap(model), points(), steps=2, **QUIET)
        found.append(model.state_dict())
    for other in found[1:]:
        assert all(torch.equal(other[key], value) for key, value in found[0].items())


def test_a_wrapped_net_is_to_be_given_itself() -> None:
    net = torch.nn.DataParallel(ed.EveryDepth(mlp()))
    with pytest.raises(
        SettingError, match=r"got an EveryDepth inside DataParallel; pass the EveryDepth"
    ):
        ed.fit(net, points(), steps=1, **QUIET)


def test_early_stopping_on_an_unknown_metric_lists_those_there_are() -> None:
    rule = EarlyStopping(metric="f1")
    with pytest.raises(SettingError, match="watches 'f1', but validation measures loss, mse"):
        ed.fit(net(), points(), points(), steps=1, early_stopping=rule, **QUIET)


@pytest.mark.parametrize("empty", [[], DataLoader(Listed(0), batch_size=4)])
def test_data_that_yields_nothing_is_an_error(empty: Any) -> None:
    with pytest.raises(DataError, match=r"yields no batch in epoch 1; give a Dataset"):
        ed.fit(net(), empty, epochs=1, **QUIET)


def test_a_generator_is_good_for_one_epoch_only() -> None:
    def once() -> Iterator[dict[str, Tensor]]:
        yield from batches(points(16), 8)

    assert ed.fit(net(), once(), steps=2, **QUIET).steps == 2
    with pytest.raises(DataError, match="no batch in epoch 2; a generator can be"):
        ed.fit(net(), once(), steps=3, **QUIET)


def test_epochs_of_unknown_length_ask_for_steps() -> None:
    with pytest.raises(SettingError, match=r"the number of batches in an epoch of .* is unknown"):
        ed.fit(net(), iter([]), epochs=1, **QUIET)


def test_empty_validation_data_is_an_error() -> None:
    with pytest.raises(BatchError, match="the data has no batches"):
        ed.fit(net(), points(), [], steps=1, **QUIET)


def test_labels_outside_the_head_are_named() -> None:
    data = [{"pixel_values": torch.rand(2, 1, 8, 8), "labels": torch.tensor([0, 10])}]
    with pytest.raises(LabelError, match=r"label 10, but the head of ViT.* has 10 classes"):
        ed.fit(ed.EveryDepth(vit(), ed.lpa()), data, steps=1, **QUIET)


def test_a_batch_without_labels_is_named() -> None:
    with pytest.raises(LabelError, match=r"keys \['inputs'\], but .* needs 'labels'"):
        ed.fit(net(), [{"inputs": torch.zeros(2, 4)}], steps=1, **QUIET)


class Poison(Callback):
    """Spoils a weight after some step."""

    def __init__(self, step: int, block: int) -> None:
        self.step, self.block = step, block

    def on_step(self, training: Training) -> None:
        if training.step == self.step:
            block = training.net.stream.blocks[self.block - 1].module
            next(block.parameters()).data.fill_(math.nan)


def test_nan_stops_names_the_first_depth_and_keeps_the_last_good_checkpoint(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    with pytest.raises(NonFiniteError, match=r"at step 6: NaN .* block 2 \(depth 2 of 3\)") as e:
        ed.fit(net(), points(), steps=9, run=run, save_every=2, callbacks=[Poison(5, 2)], **QUIET)
    assert e.value.depth == 2
    assert "last good checkpoint is step 4" in str(e.value)
    saved = Run.open(run).checkpoint()
    assert saved.step == 4
    assert all(bool(v.isfinite().all()) for v in saved.load("model").values())


def test_spoilt_weights_are_never_saved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(NonFiniteError, match=r"the weight blocks\.1\.\S+ holds NaN") as error:
        ed.fit(net(), points(), steps=9, run=run, save_every=2, callbacks=[Poison(4, 2)], **QUIET)
    assert "last good checkpoint is step 2" in str(error.value)
    assert Run.open(run).latest() == 2


def test_nan_in_the_data_is_found_at_the_embedding() -> None:
    bad = [{"inputs": torch.full((2, 4), math.nan), "labels": torch.zeros(2, 2)}]
    with pytest.raises(NonFiniteError, match=r"after the embedding .* no checkpoint was saved"):
        ed.fit(net(), bad, steps=1, **QUIET)


@pytest.mark.parametrize("where", ["inputs", "statistics"])
def test_validation_makes_no_accuracy_of_nan(where: str) -> None:
    model: Any = vit()
    network, held_out = ed.EveryDepth(model), digits(20, "test").batch(range(20))
    if where == "inputs":
        held_out["pixel_values"][7] = torch.nan
    else:
        model.classifier.register_forward_hook(
            lambda module, _, out: out if module.training else out * torch.nan
        )
    with pytest.raises(NonFiniteError, match="in evaluation, the loss is NaN at depth 1 of") as it:
        ed.fit(network, digits(32), held_out, steps=1, progress=False)
    assert it.value.depth == 1


def test_nan_in_the_labels_is_found_in_the_loss() -> None:
    bad = [{"inputs": torch.zeros(2, 4), "labels": torch.full((2, 2), math.nan)}]
    with pytest.raises(NonFiniteError, match="all states are finite, but not the loss"):
        ed.fit(net(), bad, steps=1, **QUIET)


def test_an_error_that_names_a_depth_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(NonFiniteError("NaN", 3)))  # noqa: S301 - our own bytes
    assert (str(error), error.depth) == ("NaN", 3)


# -- odds and ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "shown"), [(1, [1]), (2, [1, 2]), (6, [1, 3, 6]), (12, [3, 6, 12])]
)
def test_progress_shows_a_shallow_a_middle_and_the_last_depth(depth: int, shown: list[int]) -> None:
    assert shown_depths(depth) == shown


def test_the_bar_and_its_figures_fit_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr("everydepth.training.progress.Console", lambda **_: terminal)
    with Display(30, 120_000, enabled=True) as display:
        display.step(50_000, 11, {7: 2.303, 15: 1.25, 30: 0.875})
        display.validated({"accuracy": (0.125,) * 30})
        display.progress.refresh()
        lines = [str(line) for line in terminal.render_lines(display.progress.get_renderable())]
    assert "50000/120000" in screen.getvalue()
    assert "left" in screen.getvalue()
    assert "7 2.303  15 1.250  30 0.875  accuracy 0.125 0.125 0.125" in screen.getvalue()
    assert len(lines) == 2


def test_the_cost_of_a_step_counts_weights_gradients_optimizer_and_activations() -> None:
    network, batch = net(), points(1000).batch(range(1000))
    cost = cost_of(network, batch)
    size = sum(p.numel() * 4 for p in network.parameters())
    assert cost.memory - cost.activations == 4 * size
    # At least the stream and the inside of each of three blocks, 8 numbers a row each.
    assert cost.activations >= 1000 * 8 * 4 * 6
    assert cost.seconds > 0
    halves = cost_of(network, batch, pieces=2)
    assert halves.activations == pytest.approx(cost.activations / 2, rel=0.01)


@pytest.mark.parametrize("pieces", [1, 2])
def test_rows_without_labels_train_a_distilled_objective(pieces: int) -> None:
    network = vit(dropout=0.0)
    net = ed.EveryDepth(network, ed.lpa().distilled())
    images = digits(16).batch(range(16))["pixel_values"]
    before = weights(network)
    done = ed.fit(
        net,
        [{"pixel_values": images}],
        steps=2,
        optimizer="sgd",
        grad_accumulation=pieces,
        progress=False,
    )
    assert done.steps == 2
    moved = {key for key, value in weights(network).items() if not torch.equal(value, before[key])}
    assert any(key.startswith("vit.layers.0") for key in moved)
    # Nothing is asked of the last block, which is taken as given.
    assert not any(key.startswith("vit.layers.2") for key in moved)


def test_gradients_that_were_there_before_have_no_part_in_the_first_step() -> None:
    clean, dirty = net(), net()
    for parameter in dirty.parameters():
        parameter.grad = torch.ones_like(parameter)
    for network in (clean, dirty):
        ed.fit(network, points(32), steps=2, optimizer="sgd", **QUIET)
    assert same(weights(clean), weights(dirty))


def test_gradients_of_what_is_not_trained_do_not_add_up_in_the_clipped_norm() -> None:
    network = net()
    trained = list(network.parameters())[-2:]
    found: list[float | None] = []

    class Norms(Callback):
        def on_step(self, training: Any) -> None:
            found.append(training.grad_norm)

    data = [points(32).batch(range(32))]
    optimizer = SGD(trained, lr=1e-9)
    options: dict[str, Any] = {"clip": 1e9, "schedule": "constant", "callbacks": [Norms()]}
    ed.fit(network, data, steps=3, optimizer=optimizer, **options, **QUIET)
    assert found == pytest.approx([found[0]] * 3, rel=1e-4)
    assert all(parameter.grad is None for parameter in network.parameters())


def test_the_clipped_norm_is_that_of_what_is_trained() -> None:
    norms: list[float | None] = []

    class Norms(Callback):
        def on_step(self, training: Training) -> None:
            norms.append(training.grad_norm)

    networks = net(), net()
    for network, freezes in zip(networks, (False, True), strict=True):
        *others, last = network.parameters()
        for parameter in others:
            parameter.requires_grad_(not freezes)
        how: dict[str, Any] = {"optimizer": SGD([last], lr=1.0), "schedule": "constant"} | QUIET
        data = [points(32).batch(range(32))]
        ed.fit(network, data, steps=1, clip=0.01, callbacks=[Norms()], **how)
    assert norms[0] == pytest.approx(norms[1])
    torch.testing.assert_close(
        list(networks[0].parameters())[-1], list(networks[1].parameters())[-1]
    )


def test_an_optimizer_that_fit_cannot_use_is_refused() -> None:
    frozen = net()
    frozen.requires_grad_(False)
    with pytest.raises(SettingError, match="every parameter of the optimizer is frozen"):
        ed.fit(frozen, points(), steps=1, optimizer=SGD(frozen.parameters()), **QUIET)
    closed = net()
    with pytest.raises(SettingError, match="LBFGS computes the loss several times per step"):
        ed.fit(closed, points(), steps=1, optimizer=LBFGS(closed.parameters()), **QUIET)
    with pytest.raises(
        SettingError, match=r"would learn are float16, .*call model.float\(\) first"
    ):
        ed.fit(net().half(), points(), steps=1, **QUIET)


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_every_group_of_an_optimizer_has_a_rate_of_its_own(kind: Any) -> None:
    """A number or a tensor; the second group also has a frozen parameter."""
    network, alone = net(), net()
    for one in (network, alone):
        list(one.parameters())[-1].requires_grad_(False)

    def optimizer_of(one: ed.EveryDepth) -> AdamW:
        first, *rest = one.parameters()
        return AdamW([{"params": [first], "lr": kind(0.1)}, {"params": rest, "lr": kind(0.01)}])

    optimizer, by_hand = optimizer_of(network), optimizer_of(alone)
    data = [points().batch(range(8)), points().batch(range(8, 16))]
    options: dict[str, Any] = {"steps": 2, "schedule": "constant", "log_every": 1}
    result = ed.fit(network, data, optimizer=optimizer, **options, **QUIET)
    for batch in data:
        alone(**batch).loss.backward()
        by_hand.step()
        by_hand.zero_grad()
    assert same(weights(network), weights(alone))
    assert [group["lr"] for group in optimizer.param_groups] == [kind(0.1), kind(0.01)]
    assert [line["lr"] for line in result.history] == pytest.approx([0.1, 0.1])


def test_an_optimizer_of_another_network_is_refused() -> None:
    network, other = net(), net()
    mixed = SGD([*network.parameters(), next(other.parameters())], lr=0.1)
    for optimizer in (SGD(other.parameters(), lr=0.1), mixed):
        with pytest.raises(SettingError, match=r"of the optimizer's \d+ parameters do not belong"):
            ed.fit(network, points(8), steps=1, optimizer=optimizer, **QUIET)


def test_a_curriculum_goes_on_in_a_loop_of_ones_own_after_fit() -> None:
    network = net(ed.layerskip(every=3, dropout=0.0), blocks=4)
    ed.fit(network, points(), steps=5, batch_size=8, **QUIET)
    batch = points().batch(range(8))
    supervised = [tuple(network(**batch).losses) for _ in range(3)]
    expected = [network.objective.weights(step, None, 4) for step in (5, 6, 7)]
    assert supervised == [tuple(w.nonzero().flatten().tolist()) for w in expected]
    assert len(set(supervised)) > 1


def test_the_random_numbers_of_the_user_go_on_as_if_nothing_had_happened() -> None:
    # Python's own are left out here: the type checks of these tests draw from them.
    def drawn() -> tuple[float, float]:
        return float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002

    def seeded() -> None:
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)

    train, valid = digits(16), digits(8)
    for fails in (False, True):
        network = ed.EveryDepth(vit())
        seeded()
        expected = drawn()
        seeded()
        if fails:
            with pytest.raises(NonFiniteError):
                ed.fit(network, train, steps=3, lr=1e30, **QUIET)
        else:
            ed.fit(network, train, valid, steps=2, **QUIET)
        assert drawn() == expected
