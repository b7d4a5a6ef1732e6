"""Early exit pays or says so: made-up costs, a bet on any loss, and a refusal."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.zoo import ENTRIES
from torch import Tensor

from everydepth.errors import SettingError
from everydepth.exits import FullDepthWarning, calibrate
from everydepth.exits.calibrate import Outcomes, by_the_clock, certified
from everydepth.exits.card import model_card
from everydepth.exits.clock import ExitClock, block_speedup
from everydepth.exits.export import Manifest
from everydepth.exits.policies import NEVER, Confidence, layer_speedup
from everydepth.exits.risk import Counts, bounded_p_value, paired_p_value
from everydepth.stream import Cursor, as_stream


def clock(test: float, blocks: int = 6, rows: int = 8) -> ExitClock:
    """Blocks of one second for the whole batch, and tests of `test`."""
    return ExitClock(
        rows=rows,
        start=0.0,
        fixed=np.zeros(blocks),
        each=np.full(blocks, 1 / rows),
        test=(0.0, test / rows),
    )


def easy(rows: int = 4000) -> Outcomes:
    """Every depth is right and sure of three quarters of the samples, and wrong about the rest."""
    labels = torch.zeros(rows, dtype=torch.long)
    sure = (torch.arange(rows) % 4 != 0)[:, None].expand(-1, 5)
    predicted = torch.cat([(~sure).long(), labels[:, None]], 1)
    return Outcomes(torch.where(sure, 0.999, 0.2), predicted, labels, 3)


def test_tests_are_as_far_apart_as_a_readout_is_dear() -> None:
    assert clock(0.01).tested() == [1, 2, 3, 4, 5]
    assert clock(0.5).tested() == [2, 4]
    assert clock(3.0).tested() == []


def test_the_speed_up_is_that_of_counted_seconds() -> None:
    leaving = torch.tensor([1, 1, 6, 6])
    # Six blocks and a readout, against one block for all, five for half, two readouts.
    expected = (6 + 0.1) / (1 + 5 * 0.5 + 0.1 + 0.1 * 0.5)
    assert clock(0.1).speedup(leaving, [1]) == pytest.approx(expected)
    assert clock(0.1).speedup(torch.full((4,), 6), []) == pytest.approx(1)


def test_blocks_are_counted_by_what_they_take() -> None:
    # Two rows run the first block of three seconds alone, two all three.
    leaving, seconds = torch.tensor([1, 1, 3, 3]), np.array([3.0, 1.0, 1.0])
    assert block_speedup(leaving, seconds) == pytest.approx(5 / (3 + 0.5 + 0.5))
    assert block_speedup(leaving, np.ones(3)) == pytest.approx(layer_speedup(leaving, 3))


def test_exits_that_pay_are_kept_with_their_speed_up() -> None:
    policy = certified(easy(), Confidence, risk=0.05, delta=0.05)
    found = by_the_clock(policy, easy(), clock(0.05), decides=True)
    assert found.threshold == policy.threshold
    assert found.certificate is not None
    assert found.certificate.clock is not None
    assert found.certificate.clock > 1.5
    assert "the speed, in batches of" in found.certificate.note


def test_a_certificate_tells_blocks_by_number_and_by_time() -> None:
    policy = certified(easy(), Confidence, risk=0.05, delta=0.05)
    assert policy.certificate is not None
    assert policy.certificate.block_speedup is None
    assert policy.certificate.saved == "2.67x fewer blocks"
    dear = replace(clock(0.05), each=np.array([10.0, 1, 1, 1, 1, 1]) / 8)
    found, model = by_the_clock(policy, easy(), dear, decides=False), torch.nn.Linear(1, 1)
    assert found.certificate is not None
    # Three quarters leave after the first block, which takes as long as ten of the others.
    assert found.certificate.block_speedup == pytest.approx(15 / (10 + 5 / 4))
    assert found.certificate.saved == "2.67x fewer blocks, which take 1.33x less time"
    assert found.certificate.saved in found.certificate.note
    assert found.certificate.saved in model_card(
        Manifest(model="ViT", depth=6, of=6, format="hf", exits=True),
        model,
        profile=None,
        policy=found,
        usage="",
    )
    assert Confidence.from_json(found.to_json()) == found
    older: dict[str, Any] = json.loads(found.to_json())
    del older["certificate"]["block_speedup"]
    assert Confidence.from_json(json.dumps(older)).certificate is not None


def test_exits_that_do_not_pay_give_the_full_model_and_say_so() -> None:
    policy = certified(easy(), Confidence, risk=0.05, delta=0.05)
    with pytest.warns(FullDepthWarning, match="full depth is faster"):
        found = by_the_clock(policy, easy(), clock(30.0), decides=True)
    assert set(found.threshold) == {NEVER}  # pyright: ignore[reportArgumentType]
    assert found.certificate is not None
    assert found.certificate.clock is not None
    assert found.certificate.clock < 1
    assert Confidence.from_json(found.to_json()) == found


def test_by_default_slow_exits_are_told_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = ENTRIES["ViT"].make()
    data = {key: value.repeat(20, *[1] * (value.ndim - 1)) for key, value in batch.items()}
    monkeypatch.setattr(ExitClock, "speedup", lambda *_: 0.91)
    untimed = calibrate(model, data, risk=0.9, clock=False, progress=False)
    with pytest.warns(FullDepthWarning, match=r"0\.91x the speed.*unless calibrate\(clock=True"):
        found = calibrate(model, data, risk=0.9, progress=False)
    assert found.threshold == untimed.threshold
    assert found.certificate is not None
    assert untimed.certificate is not None
    assert untimed.certificate.clock is None
    assert found.certificate.clock == 0.91
    assert calibrate(model, iter([data]), risk=0.9, progress=False) == untimed  # only once


def test_a_model_is_timed_and_tested_where_it_can_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = ENTRIES["ViT"].make()
    data = {key: value.repeat(20, *[1] * (value.ndim - 1)) for key, value in batch.items()}
    timed = ExitClock.measured(as_stream(model), data)
    assert len(timed.fixed) == 4
    assert (timed.fixed >= 0).all()
    monkeypatch.setattr(ExitClock, "measured", lambda *_, **__: clock(0.5, blocks=4))
    policy = calibrate(model, data, risk=0.9, clock=True, progress=False)
    thresholds = policy.threshold
    assert isinstance(thresholds, tuple)
    assert thresholds[0] == thresholds[2] == NEVER > thresholds[1]


def test_a_test_is_timed_with_what_taking_rows_out_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = ENTRIES["ViT"].make()
    stream, taken = as_stream(model), list[int]()
    select = Cursor.select

    def slow(cursor: Cursor, rows: Tensor) -> Cursor:
        taken.append(len(rows))
        time.sleep(0.2)
        return select(cursor, rows)

    monkeypatch.setattr(Cursor, "select", slow)
    timed = ExitClock.measured(stream, batch, repeats=1)
    assert set(taken) == {3, 1}  # a batch of three, and a quarter of it
    assert sum(timed.test) > 0.19


# -- a loss of one's own -------------------------------------------------------------------------


def test_the_bet_on_any_loss_is_that_on_counts_where_losses_are_counts() -> None:
    losses = np.array([1.0] * 3 + [-1.0] * 2 + [0.0] * 95)
    counted = paired_p_value(Counts(100, 3, 2), 0.1)
    assert bounded_p_value(losses, 0.1) == pytest.approx(counted)


def test_a_wrong_threshold_passes_at_most_as_often_as_delta_says() -> None:
    random = np.random.default_rng(0)
    passed = 0
    for _ in range(300):
        losses = random.uniform(0, 0.2, 200)  # their mean is the risk that is denied
        passed += bounded_p_value(losses, 0.1) <= 0.1
    assert passed <= 45  # delta = 0.1 of 300, and three standard deviations


def test_accuracy_as_a_loss_of_ones_own_is_accuracy() -> None:
    model, batch = ENTRIES["ViT"].make()
    data = {key: value.repeat(40, *[1] * (value.ndim - 1)) for key, value in batch.items()}
    data["labels"] = torch.arange(120) % 10

    def wrong(logits: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None
        return (logits.argmax(-1) != labels).float()

    settings: dict[str, Any] = {"risk": 0.5, "progress": False}
    own = calibrate(model, data, risk_of=wrong, **settings)
    word = calibrate(model, data, risk_of="accuracy", **settings)
    labels = calibrate(model, data, against="labels", **settings)
    assert own.threshold == word.threshold == labels.threshold


def test_losses_outside_of_zero_to_one_are_refused() -> None:
    model, batch = ENTRIES["ViT"].make()
    with pytest.raises(SettingError, match="one number from 0 to 1 for each of the 3 rows"):
        calibrate(model, batch, risk=0.5, risk_of=lambda z, _: z[:, 0] * 99, progress=False)
    with pytest.raises(SettingError, match="use 'disagreement', 'accuracy', or a function"):
        calibrate(model, batch, risk=0.5, risk_of="wrong", progress=False)
