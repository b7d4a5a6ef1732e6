"""Requests in order, places, cancellation, prices and the governor, on a clock of our own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.helpers.talking import Talker
from transformers import LlamaConfig, LlamaForCausalLM

import everydepth as ed
from everydepth.errors import BatchError, DepthError, EveryDepthError, PolicyError, SettingError
from everydepth.exits.profile import DepthProfile, Latency, Profile
from everydepth.results import curve
from everydepth.serving import (
    Arrival,
    Busy,
    Costs,
    Deadline,
    Fixed,
    Load,
    Price,
    Request,
    Scheduler,
    Speed,
    Ticket,
    Work,
    read_load,
    simulate,
)
from everydepth.serving.governor import predict
from everydepth.serving.simulation import price_of

PRICE = Price(call=1e-3, token=2e-4, readout=1e-4, read=3e-4)


def drained(scheduler: Scheduler) -> None:
    while scheduler.step():
        pass


def test_requests_get_what_they_get_alone_and_say_their_depth(talker: Talker) -> None:
    scheduler = Scheduler(ed.as_stream(talker.model), places=2)
    tickets = [
        scheduler.submit(Request(prompt=(5, 6, 7 + i), max_tokens=5, depth=1 + i % 4))
        for i in range(5)
    ]
    drained(scheduler)
    for i, ticket in enumerate(tickets):
        alone = ed.generate(
            talker.model, [5, 6, 7 + i], max_new_tokens=5, depth=1 + i % 4, eos_token_id=()
        )
        assert ticket.tokens == alone.tokens[0]
        assert (ticket.depth, ticket.finish) == (1 + i % 4, "length")
    assert scheduler.counts.finished == 5
    assert scheduler.counts.tokens == 25


def test_no_more_rows_than_places_and_first_come_first_served(talker: Talker) -> None:
    scheduler = Scheduler(ed.as_stream(talker.model), places=2)
    tickets = [scheduler.submit(Request(prompt=(5,), max_tokens=3)) for _ in range(3)]
    scheduler.step()
    assert [t.row is not None for t in tickets] == [True, True, False]
    drained(scheduler)
    assert tickets[2].begun >= max(tickets[0].ended, tickets[1].ended)


def test_a_full_queue_is_said_and_a_cancelled_request_makes_room(talker: Talker) -> None:
    scheduler = Scheduler(ed.as_stream(talker.model), places=1, queue=2)
    first, second = (scheduler.submit(Request(prompt=(5,), max_tokens=9)) for _ in range(2))
    with pytest.raises(Busy, match="2 requests are already waiting"):
        scheduler.submit(Request(prompt=(5,)))
    scheduler.step()
    scheduler.cancel(first)
    scheduler.cancel(first)  # again: nothing happens
    scheduler.cancel(second)
    assert scheduler.counts.cancelled == 2
    assert not scheduler.step()


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (Request(prompt=()), BatchError, "prompt is empty"),
        (Request(prompt=(10**9,)), BatchError, "token 1000000000"),
        (Request(prompt=(3,) * 250), BatchError, "has 256 positions"),
        (Request(prompt=(3,), max_tokens=0), SettingError, "max_tokens 0"),
        (Request(prompt=(3,), depth=9), DepthError, "depth 9"),
        (Request(prompt=(3,), draft_depth=4), DepthError, "draft_depth 4"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_any_work(
    talker: Talker, request_: Request, error: type[Exception], words: str
) -> None:
    scheduler = Scheduler(ed.as_stream(talker.model))
    with pytest.raises(error, match=words):
        scheduler.submit(request_)
    assert scheduler.counts.requests == 0


def test_a_request_that_cannot_begin_is_turned_away_and_the_others_go_on(talker: Talker) -> None:
    scheduler = Scheduler(ed.as_stream(talker.model))
    foreign = ed.Confidence(threshold=(0.5, 0.5))  # for a model of three depths
    told: list[Ticket] = []
    first = scheduler.submit(Request(prompt=(5, 6), max_tokens=3))
    scheduler.step()
    wrong = scheduler.submit(
        Request(prompt=(5, 6), max_tokens=3, policy=foreign), lambda ticket, _: told.append(ticket)
    )
    last = scheduler.submit(Request(prompt=(5, 6), max_tokens=3))
    drained(scheduler)
    assert isinstance(wrong.error, PolicyError)
    assert (wrong.finish, told, scheduler.counts.cancelled) == ("cancelled", [wrong], 1)
    assert first.tokens == last.tokens
    assert (first.finish, last.finish) == ("length", "length")


LONG = 100_000


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_prompt_of_100_000_tokens_holds_up_no_others_and_gives_its_memory_back() -> None:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=2 * LONG,
    )
    scheduler = Scheduler(ed.as_stream(LlamaForCausalLM(config).eval()))
    short = Request(prompt=(1, 2, 3), max_tokens=16)
    alone = scheduler.submit(short)
    scheduler.step()
    usual = scheduler.batch.cache.bytes
    drained(scheduler)
    long = scheduler.submit(Request(prompt=(5,) * LONG, max_tokens=2))
    others = [scheduler.submit(short)]
    while long.finish is None:
        scheduler.step()
        if others[-1].finish is not None:
            others.append(scheduler.submit(short))
    assert scheduler.batch.cache.bytes <= 2 * usual  # though another request is running
    drained(scheduler)
    assert len(others) > LONG // 256 // 17
    assert [one.tokens for one in others] == [alone.tokens] * len(others)


def test_prices_are_learned_from_rounds() -> None:
    costs = Costs()
    for step in range(200):
        calls, rows = 1 + step % 7, 1 + step % 5
        work = Work(calls, passes=calls * rows, readouts=step % 5, reads=step % 3)
        costs.learn(work, PRICE.of(work))
    for work in (Work(12, 12, 1, 1), Work(3, 90, 30, 2)):
        assert costs.price.of(work) == pytest.approx(PRICE.of(work), rel=0.02)


def test_prices_are_those_given_until_rounds_were_seen() -> None:
    costs, work = Costs(PRICE), Work(12, 12, 1, 1)
    assert costs.price.of(work) == pytest.approx(PRICE.of(work))
    for _ in range(3):
        costs.learn(work, 2 * PRICE.of(work))
    assert costs.price.of(work) == pytest.approx(2 * PRICE.of(work), rel=0.01)


def test_the_governor_goes_shallower_with_load_and_never_below_its_floor() -> None:
    governor = Deadline(1.0, range(3, 13))

    def chosen(rows: int, waiting: int = 0, waited: float = 0.0) -> int:
        load = Load(
            depths=(12,) * rows,
            waiting=waiting,
            places=64,
            price=PRICE,
        )
        return governor.choose(load, 10, 40, waited)

    assert chosen(0) == 12
    depths = [chosen(rows) for rows in range(0, 64, 4)]
    assert depths == sorted(depths, reverse=True)
    assert depths[-1] == 3
    assert chosen(0, waited=0.99) == 3
    for _ in range(30):
        governor.learn(40, 0.5, 0.6)  # within a second of its own, but it had waited
    assert chosen(0) < 12
    for _ in range(2000):
        governor.learn(40, 0.1, 0.6)
    assert chosen(0) == 12


def test_a_governor_misses_its_target_as_often_as_it_may() -> None:
    governor = Deadline(1.0, range(1, 13))
    rng, missed = np.random.default_rng(0), 0
    for _ in range(4000):
        # Whatever was promised takes one to five times as long.
        took = 0.9 / governor.caution * float(rng.uniform(1, 5))
        governor.learn(40, 0.0, took)
        missed += took > 1.0
    assert missed / 4000 < 0.04
    assert governor.caution < governor.MOST


def test_a_target_of_speed_is_a_time_for_each_token() -> None:
    governor = Speed(20.0, range(3, 13))
    busy = Load(depths=(12,) * 24, waiting=0, places=64, price=PRICE)
    idle = Load(depths=(), waiting=0, places=64, price=PRICE)
    assert governor.choose(idle, 10, 40, 0.0) == governor.choose(idle, 10, 40, 9.0) == 12
    chosen = governor.choose(busy, 10, 400, 0.0)
    assert 3 <= chosen < 12
    assert predict(busy, chosen, 10, 400) <= 400 / 20 or chosen == 3
    assert predict(busy, chosen + 1, 10, 400) > governor.AIM * 400 / 20


def test_a_simulated_load_meets_its_target_with_the_governor_and_not_without(
    talker: Talker,
) -> None:
    stream = ed.as_stream(talker.model)
    # Twice what full depth sustains: a place is free every 32 rounds of 8 rows at depth 4.
    full = 8 / (32 * PRICE.of(Work(calls=4, passes=32, readouts=8)))
    load = [Arrival(at=i / (2 * full), prompt=8, tokens=32) for i in range(160)]
    target = 1.0
    left = simulate(stream, load, PRICE, governor=Fixed(4), places=8).numbers
    kept = simulate(stream, load, PRICE, governor=Deadline(target, range(1, 5)), places=8).numbers
    assert left["p95_seconds"] > 2 * target
    assert kept["p95_seconds"] < target
    assert kept["requests"] == 160
    assert 1 <= kept["mean_depth"] < 4


@pytest.mark.parametrize("balconies", [(), (1, 3)], ids=["plain", "balconies"])
def test_a_simulation_is_what_a_real_batch_counts(
    talker: Talker, balconies: tuple[int, ...]
) -> None:
    stream = ed.as_stream(talker.model)
    if balconies:
        stream = ed.as_stream(ed.balcony(talker.model, balconies, blocks=2).eval())
    real, seconds = Scheduler(stream, places=4), 0.0
    for i in range(6):
        real.submit(Request(prompt=(4,) * (3 + i), max_tokens=5, depth=1 + i % 4))
    while real.step():
        seconds += PRICE.of(real.batch.work)
    load = [Arrival(at=0, prompt=3 + i, tokens=5, depth=1 + i % 4) for i in range(6)]
    found = simulate(stream, load, PRICE, places=4).numbers
    assert 30 / found["tokens_per_second"] == pytest.approx(seconds)


def test_prices_of_a_profile_are_those_its_times_were_made_of() -> None:
    rows, length = 4, 16

    def milliseconds(calls: int, tokens: int, readouts: int) -> Latency:
        took = 1000 * PRICE.of(Work(calls, tokens, readouts, 1))
        return Latency(low=took, median=took, high=took)

    depths = [
        DepthProfile(
            depth=k,
            quality=0.5,
            parameters=1,
            checkpoint_bytes=1,
            flops=1,
            peak_bytes=1,
            latency=milliseconds(k, k * length, length),
            batch_latency=milliseconds(k, k * length * rows, length * rows),
        )
        for k in range(1, 7)
    ]
    profile = Profile.of(depths, metric="accuracy", batch_size=rows, row_tokens=length)
    assert price_of(profile) is None  # it does not say how long a token takes
    writing = [1 / PRICE.of(Work(k, k, 1, 1)) for k in range(1, 7)]
    found = price_of(profile.with_results(curve("decode", list(range(1, 7)), writing)))
    assert found is not None
    assert found.call == pytest.approx(PRICE.call)
    assert found.token == pytest.approx(PRICE.token)
    assert found.readout == pytest.approx(PRICE.readout)
    assert found.read == pytest.approx(PRICE.read)


def test_a_load_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[1]", '{"at": 1}', '[{"at": -1, "prompt": 1, "tokens": 1}]', '[{"at": 0}]'):
        (tmp_path / "load.json").write_text(text)
        with pytest.raises(EveryDepthError):
            read_load(tmp_path / "load.json")
