"""Drafting pays or stops: simulated costs and acceptance, no clock of this machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from everydepth.exits.generation.output import Output
from everydepth.exits.generation.pacing import (
    IN_ADVANCE,
    RISKED,
    ByLength,
    Experience,
    Ledger,
    Pace,
    experience_of,
    remember,
)

SHARE = st.floats(0, 1)


@dataclass(frozen=True)
class Machine:
    """Seconds, where a plain step takes one.

    draft: of one. judging, jump, more: of verifying one token, what several cost beyond that, and
    what each further one adds. accepted, sure: the chance of a draft, and the confidence that goes
    with it; None: the chance of each is its confidence, which varies. first: the share of the
    blocks that tell what a verification costs. extra: what a round of one draft is told to take
    beyond a plain step, at most.
    """

    draft: float
    judging: float = 1.0
    jump: float = 0.0
    more: float = 0.0
    accepted: float = 0.5
    sure: float | None = None
    first: float = 1 / 8
    extra: float = 1.0

    def verify(self, n: int) -> float:
        return self.judging + (self.jump if n > 1 else 0) + self.more * (n - 1)

    def verified(self, pace: Pace, n: int, took: Callable[[float], float]) -> tuple[int, float]:
        """How many were verified, and what it took: the first blocks may say that n are many."""
        if not pace.looks(n):
            return n, took(self.verify(n))
        start = took(self.first * self.verify(n))
        kept = pace.affordable(n, start)
        return kept, start + took((1 - self.first) * self.verify(kept))

    def confidence(self, chance: random.Random) -> float:
        if self.sure is not None:
            return self.sure
        return min(1.0, max(0.0, chance.gauss(self.accepted, 0.25)))

    def right(self, confidence: float, chance: random.Random) -> bool:
        return chance.random() < (confidence if self.sure is None else self.accepted)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Any on which a draft is a part of a plain step, verifying it is another, and a token more
    costs no more than one alone."""
    draft = 0.01 + 0.99 * draw(SHARE)
    # Beside the blocks of a plain step there is a second readout, of up to another plain step.
    judging = max(0.01, 1 - draft + draw(SHARE) * min(1, draft))
    more = judging * draw(SHARE)
    return Machine(
        draft,
        judging,
        jump=(judging - more) * draw(SHARE),
        more=more,
        accepted=draw(SHARE),
        sure=draw(st.none() | SHARE),
    )


def simulated(
    machine: Machine,
    *,
    tokens: int,
    stop: int | None = None,
    noise: float = 0.0,
    seed: int = 0,
    rows: int = 1,
    known: Experience | None = None,
    looking: bool = True,
) -> tuple[float, int]:
    """Speed against plain steps, and the rounds that drafted; it ends after `stop` tokens."""
    chance = random.Random(seed)
    stop = tokens if stop is None else stop
    out, ledger = Output(rows, stop, (), None), Ledger(tokens)
    pace, clock, rounds = Pace(ledger, known=known, looking=looking), 0.0, 0
    pace.prepare(0.0, machine.extra)

    def took(seconds: float) -> float:
        return seconds * (1 + noise * chance.random())

    while out.active:
        rows = ledger.rows = len(out.active)
        if not pace.drafts():
            seconds = took(1.0)
            ledger.learn_plain(seconds)
            rest = min(pace.rest(), out.remaining - 1)
            ledger.rest(rest)
            clock += seconds + rest * (1 + noise / 2)
            out.emit([[0] * (1 + rest)] * rows)
            continue
        pace.begin(rows)
        rounds += 1
        drafting: list[float] = []
        confidences: list[list[float]] = []
        going = True
        while going and len(drafting) < min(16, out.remaining):
            drafting.append(took(machine.draft))
            confidences.append([machine.confidence(chance) for _ in range(rows)])
            going = pace.goes_on(confidences[-1])
        n, verifying = machine.verified(pace, len(drafting), took)
        right = [
            next((i for i, c in enumerate(said[:n]) if not machine.right(c, chance)), n)
            for said in zip(*confidences, strict=True)
        ]
        kept = [min(count + 1, n) for count in right]
        kept = kept if pace.pays else [min(kept)] * rows
        pace.learn(right, drafting, verifying, out.nearer(kept))
        clock += sum(drafting) + verifying
        out.emit([[0] * count for count in kept])
    return stop * (1 + noise / 2) / clock, rounds


@settings(max_examples=60)
@given(machines(), st.integers(1, 400), st.integers(0, 99))
def test_drafting_costs_at_most_two_percent_on_any_machine(
    machine: Machine, tokens: int, seed: int
) -> None:
    speed, _ = simulated(machine, tokens=tokens, seed=seed)
    assert speed >= 0.98


@settings(max_examples=60)
@given(machines(), st.integers(1, 200), st.integers(0, 99))
def test_a_text_that_ends_early_loses_one_percent_and_two_steps_at_most(
    machine: Machine, stop: int, seed: int
) -> None:
    speed, _ = simulated(machine, tokens=4096, stop=stop, seed=seed)
    assert stop / speed <= stop + RISKED * (stop + 16) + IN_ADVANCE + 1e-6


@settings(max_examples=20)
@given(machines(), st.integers(0, 99))
def test_noise_of_a_quarter_costs_one_percent_more_at_most(machine: Machine, seed: int) -> None:
    speeds = [simulated(machine, tokens=512, noise=0.25, seed=seed + i)[0] for i in range(3)]
    assert sum(speeds) / 3 >= 0.97


PAYING = Machine(draft=0.2, judging=0.8, more=0.05, accepted=0.8, sure=0.8)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_drafting_that_pays_goes_on(noise: float) -> None:
    speed, rounds = simulated(PAYING, tokens=512, noise=noise)
    assert speed > 1.4
    assert rounds > 50


@settings(max_examples=10)
@given(st.floats(0.02, 0.3), st.floats(0, 0.1), st.floats(0.7, 0.95), st.integers(0, 99))
def test_most_of_what_the_best_fixed_length_gains_is_gained(
    draft: float, more: float, accepted: float, seed: int
) -> None:
    machine = Machine(draft, 1 - draft, more=more, accepted=accepted, sure=accepted)
    best = max(
        sum(accepted**i for i in range(n)) / (n * draft + machine.verify(n)) for n in range(1, 17)
    )
    speed = sum(simulated(machine, tokens=512, seed=seed + i)[0] for i in range(4)) / 4
    assert speed - 1 > 0.6 * (best - 1)


def test_a_second_draft_is_made_where_only_a_third_pays() -> None:
    # Two tokens at once take another kernel than one; from there on they are cheap.
    machine = Machine(draft=0.1, judging=0.9, jump=0.7, accepted=0.75, sure=0.75)
    # Who is wrong in the first rounds waits long: one text in four here.
    speeds = [simulated(machine, tokens=2048, seed=seed)[0] for seed in range(4)]
    assert sum(speeds) / 4 > 1.2


def test_lengths_follow_the_costs() -> None:
    cheap, _ = simulated(Machine(0.05, 0.95, more=0.02, accepted=0.95, sure=0.95), tokens=512)
    dear, _ = simulated(Machine(0.3, 0.95, more=0.2, accepted=0.95, sure=0.95), tokens=512)
    assert cheap > dear > 1


@pytest.mark.parametrize("rows", [2, 8])
def test_a_row_whose_drafts_are_never_right_does_not_make_the_others_wait(rows: int) -> None:
    out, ledger = Output(rows, 256, (), None), Ledger(256)
    pace, clock = Pace(ledger), 0.0
    while out.active:
        if not pace.drafts():
            ledger.learn_plain(1.0)
            clock += 1
            out.emit([[0]] * len(out.active))
            continue
        pace.begin(len(out.active))
        n = 1
        while pace.goes_on([0.9] * len(out.active)) and n < min(16, out.remaining):
            n += 1
        accepted = [0 if row == 0 else n for row in out.active]
        kept = [min(count + 1, n) for count in accepted]
        pace.learn(accepted, [0.2] * n, 0.8, out.nearer(kept))
        clock += 0.2 * n + 0.8
        out.emit([[0] * count for count in kept])
    assert clock <= 256 * 1.02


def test_a_short_text_is_not_risked() -> None:
    assert simulated(PAYING, tokens=16) == (1.0, 0)


def test_what_unequal_rows_add_to_plain_steps_is_lost_by_drafting() -> None:
    ledger = Ledger(512)
    for _ in range(4):
        ledger.learn_plain(1.0)
    before = ledger.left
    ledger.learn_plain(1.5, uneven=True)
    assert ledger.plain.value == 1.0
    assert ledger.left == pytest.approx(before + RISKED - 0.5)
    ledger.charge(0.25)
    assert ledger.left == pytest.approx(before + RISKED - 0.75)


def test_depths_that_take_turns_share_what_may_be_lost() -> None:
    ledger = Ledger(512)
    first, second = Pace(ledger), Pace(ledger)
    for _ in range(4):
        ledger.learn_plain(1.0)
    assert first.drafts()
    assert second.drafts()
    first.begin(1)
    first.goes_on([0.9])
    first.learn([0], [3.0], 3.0)
    assert not first.drafts()
    assert not second.drafts()


KINDS = {
    "flat": Machine(0.2, 0.85, extra=0.2),
    "nearly flat": Machine(0.2, 0.85, more=0.05, extra=0.2),
    "cheap drafts": Machine(0.05, 1.0, more=0.05, extra=0.2),
    "linear": Machine(0.2, 0.85, more=0.85, extra=0.2),
    "another kernel": Machine(0.2, 0.85, jump=0.4, extra=0.2),
    "a slow kernel": Machine(0.05, 1.0, jump=0.95, extra=0.2),
}


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_costs_makes_a_text_or_the_next_two_percent_slower(kind: str, rows: int) -> None:
    for accepted in (0.0, 0.3, 0.6, 0.9):
        machine = replace(KINDS[kind], accepted=accepted, sure=accepted)
        for tokens in (32, 64, 128, 512):
            known = Experience()
            for seed in range(3):
                speed, _ = simulated(machine, tokens=tokens, rows=rows, seed=seed, known=known)
                assert speed >= 0.98, (accepted, tokens, seed)
                known.settle()


@pytest.mark.parametrize(("tokens", "least"), [(64, 1.1), (128, 1.15), (512, 1.2)])
def test_what_pays_pays_in_a_short_text(tokens: int, least: float) -> None:
    # Three drafts in every round would give 1.35.
    machine = replace(KINDS["flat"], accepted=0.6)
    speeds = [simulated(machine, tokens=tokens, seed=seed)[0] for seed in range(8)]
    assert sum(speeds) / 8 > least


def looked(seconds: float) -> tuple[Pace, int]:
    """Two drafts where a plain step takes one second, after one that cost nothing beyond it; and
    how many of the two are verified if their first blocks take so long."""
    ledger = Ledger(64)
    pace = Pace(ledger, looking=True)
    pace.prepare(0.0, 0.1)
    for _ in range(3):
        ledger.learn_plain(1.0)
    assert pace.drafts()
    pace.begin(1)
    assert not pace.goes_on([0.9])
    assert pace.looks(1)
    assert pace.affordable(1, 0.1) == 1
    pace.learn([1], [0.1], 0.9)
    assert pace.drafts()
    pace.begin(1)
    assert pace.goes_on([0.9])
    pace.goes_on([0.9])
    assert pace.looks(2)
    return pace, pace.affordable(2, seconds)


def test_drafts_whose_first_blocks_are_too_slow_are_given_up() -> None:
    pace, kept = looked(0.2)  # all blocks would take twice as long as one token does
    assert kept == 1
    pace.learn([1], [0.1, 0.1], 1.0)
    pace.begin(1)
    assert not pace.goes_on([0.9])  # it is known now, though never done
    assert not pace.looks(2)


def test_drafts_whose_first_blocks_are_fast_are_verified() -> None:
    pace, kept = looked(0.11)
    assert kept == 2
    pace.learn([2], [0.1, 0.1], 1.0)
    assert not pace.looks(2)


def test_the_next_text_of_a_model_begins_with_what_the_last_one_showed() -> None:
    model, known = nn.Linear(1, 1), Experience()
    simulated(PAYING, tokens=512, known=known)
    assert not experience_of(model, "way").costs
    remember(model, "way", known)
    found = experience_of(model, "way")
    assert found.costs[1].verify.at(2) == known.costs[1].verify.at(2)
    assert not experience_of(model, "another way").costs
    again = simulated(PAYING, tokens=64, known=found)[0]
    assert again > simulated(PAYING, tokens=64)[0]
    # Two texts may be written at once.
    found.costs.clear()
    assert experience_of(model, "way").costs


def test_a_new_number_of_rows_is_timed_anew() -> None:
    ledger = Ledger(512)
    pace = Pace(ledger)
    ledger.rows = 8
    for _ in range(3):
        ledger.learn_plain(1.0)
    assert pace.drafts()
    ledger.rows = 7
    assert not pace.drafts()


def test_always_means_always() -> None:
    pace = Pace(Ledger(8), always=True)
    assert pace.drafts()
    pace.begin(2)
    assert not pace.goes_on([0.9, 0.9])  # what one costs is not known yet
    pace.learn([0, 0], [9.0], 9.0)
    assert pace.drafts()


def test_costs_by_length_are_lines_between_what_was_seen() -> None:
    costs = ByLength()
    costs.add(1, 1.0)
    assert costs.at(5) == 1.0
    costs.add(3, 2.0)
    assert (costs.at(1), costs.at(2), costs.at(5)) == (1.0, 1.5, 2.0)
    costs.add(4, 3.0)
    assert (costs.at(2), costs.at(5)) == (1.5, 4.0)
