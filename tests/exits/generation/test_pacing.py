"""Drafting pays off or stops: simulated costs and acceptance, no clock of this machine."""

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
    ADVANCE,
    FADING,
    SHARE,
    TRUSTED,
    Costs,
    Experience,
    Ledger,
    Pace,
    experience_of,
    remember,
)

FRACTION = st.floats(0, 1)


@dataclass(frozen=True)
class Machine:
    """Costs in plain steps.

    draft: of one draft.
    above: of the blocks above the draft's depth and the readout, for one token.
    jump, more: what several tokens add to that once, and what each further one adds.
    accepted: the chance of a draft.
    sure: the confidence of every draft; None: it varies, and is its chance.
    few: the share of the blocks that is timed before a first draft is verified; None: all of them.
    ahead: what has to be done before the first draft.
    """

    draft: float
    above: float = 0.85
    jump: float = 0.0
    more: float = 0.0
    accepted: float = 0.5
    sure: float | None = None
    few: float | None = 0.1
    ahead: float = 0.0

    @property
    def below(self) -> float:
        return max(0.0, 1 - self.above)

    def pass_over(self, tokens: int) -> float:
        return self.above + (self.jump if tokens > 1 else 0) + self.more * (tokens - 1)

    def confidence(self, chance: random.Random) -> float:
        if self.sure is not None:
            return self.sure
        return min(1.0, max(0.0, chance.gauss(self.accepted, 0.25)))

    def right(self, confidence: float, chance: random.Random) -> bool:
        return chance.random() < (confidence if self.sure is None else self.accepted)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Any machine on which one more token costs no more than the first."""
    draft, above = 0.01 + 0.99 * draw(FRACTION), 0.05 + 0.95 * draw(FRACTION)
    more = above * draw(FRACTION)
    return Machine(
        draft,
        above,
        jump=(above - more) * draw(FRACTION),
        more=more,
        accepted=draw(FRACTION),
        sure=draw(st.none() | FRACTION),
        few=draw(st.none() | st.just(0.1)),
        ahead=draw(FRACTION),
    )


class Simulation:
    """A text on a machine; `speed` is relative to plain decoding."""

    def __init__(
        self,
        machine: Machine,
        *,
        tokens: int,
        stop: int | None = None,
        noise: float = 0.0,
        seed: int = 0,
        rows: int = 1,
        known: Experience | None = None,
    ) -> None:
        self.machine, self.chance, self.noise = machine, random.Random(seed), noise
        stop = tokens if stop is None else stop
        self.out, self.ledger = Output(rows, stop, (), None), Ledger(tokens)
        self.pace = Pace(self.ledger, known=known)
        few = machine.few
        first = 1.0 if few is None else machine.below + 2 * few
        self.pace.prepare(machine.ahead, machine.draft, first)
        self.clock, self.rounds, self.first_round = 0.0, 0, stop
        while self.out.active:
            self.ledger.rows = len(self.out.active)
            if self.out.remaining == 1 or not self.pace.drafts():
                self.ledger.learn_plain(self.took(1.0))
                self.out.emit([[0]] * len(self.out.active))
            else:
                self.round()
        self.speed = stop * (1 + noise / 2) / self.clock

    def took(self, seconds: float) -> float:
        seconds *= 1 + self.noise * self.chance.random()
        self.clock += seconds
        return seconds

    def round(self) -> None:
        machine, pace, rows = self.machine, self.pace, len(self.out.active)
        if not self.rounds:
            self.first_round = len(self.out.tokens[0])
            self.ledger.charge(self.took(machine.ahead))
        self.rounds += 1
        pace.begin(rows)
        drafting: list[float] = []
        said: list[list[float]] = []
        going = True
        while going and len(drafting) < min(16, self.out.remaining - 1):
            drafting.append(self.took(machine.draft))
            said.append([machine.confidence(self.chance) for _ in range(rows)])
            going = pace.goes_on(said[-1])
        n, few = len(drafting), machine.few
        verifying, left = self.took(machine.below), 1.0
        if pace.untried and few is not None:
            alone = self.took(few * machine.pass_over(1))
            both = self.took(few * machine.pass_over(2))
            # The draft is given up, or follows through the blocks that were timed.
            verifying, left = verifying + alone + both, 1 - 2 * few
            if pace.bears(both / alone, drafting):
                verifying += self.took(few * machine.pass_over(1))
            else:
                n = 0
        verifying += self.took(left * machine.pass_over(n + 1))
        accepted = [
            next((i for i, c in enumerate(row[:n]) if not machine.right(c, self.chance)), n)
            for row in zip(*said, strict=True)
        ]
        kept = [count + 1 for count in accepted]
        kept = kept if pace.pays else [min(kept)] * rows
        pace.learn(accepted if n else [], drafting, verifying, self.out.nearer(kept))
        self.out.emit([[0] * count for count in kept])


def speed(machine: Machine, *, seeds: int = 1, **settings: int | float) -> float:
    """The mean over several texts, each of which knows nothing of the others."""
    runs = [Simulation(machine, seed=seed, **settings) for seed in range(seeds)]  # pyright: ignore[reportArgumentType]
    return sum(run.speed for run in runs) / seeds


@settings(max_examples=80)
@given(machines(), st.integers(1, 400), st.integers(0, 99))
def test_drafting_costs_at_most_two_percent_on_any_machine(
    machine: Machine, tokens: int, seed: int
) -> None:
    assert Simulation(machine, tokens=tokens, seed=seed).speed >= 0.98


@settings(max_examples=60)
@given(machines(), st.integers(1, 200), st.integers(0, 99))
def test_a_text_that_ends_early_loses_its_share_or_two_steps_at_most(
    machine: Machine, stop: int, seed: int
) -> None:
    found = Simulation(machine, tokens=4096, stop=stop, seed=seed)
    assert found.clock <= stop + max(ADVANCE, SHARE * (stop + 16)) + 1e-6


@settings(max_examples=20)
@given(machines(), st.integers(0, 99))
def test_noise_of_a_quarter_costs_one_percent_more_at_most(machine: Machine, seed: int) -> None:
    found = [Simulation(machine, tokens=512, noise=0.25, seed=seed + i).speed for i in range(3)]
    assert sum(found) / 3 >= 0.97


KINDS = {
    "flat": Machine(0.2),
    "nearly flat": Machine(0.2, more=0.05),
    "cheap drafts": Machine(0.05, 0.98, more=0.05),
    "linear": Machine(0.2, more=0.85),
    "another kernel": Machine(0.2, jump=0.4),
    "a slow kernel": Machine(0.05, 0.98, jump=0.95),
    "an exit that has to read the prompt": Machine(0.175, 0.94, jump=0.06, more=0.03, ahead=0.27),
}


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_costs_makes_a_text_or_the_next_two_percent_slower(kind: str, rows: int) -> None:
    for accepted in (0.0, 0.3, 0.6, 0.9):
        machine = replace(KINDS[kind], accepted=accepted, sure=accepted)
        for tokens in (32, 64, 128, 512):
            known = Experience()
            for seed in range(3):
                found = Simulation(machine, tokens=tokens, rows=rows, seed=seed, known=known)
                assert found.speed >= 0.98, (accepted, tokens, seed)


@pytest.mark.parametrize("rows", [1, 8])
def test_a_second_text_whose_drafts_are_all_wrong_loses_two_percent_at_most(rows: int) -> None:
    for tokens in (32, 64, 128, 512):
        known = Experience()
        good = replace(KINDS["flat"], accepted=0.9)
        Simulation(good, tokens=512, rows=rows, known=known)
        bad = replace(good, accepted=0.0, sure=0.9)
        assert Simulation(bad, tokens=tokens, rows=rows, known=known).speed >= 0.98


@pytest.mark.parametrize(
    ("kind", "tokens", "least"),
    [
        # Two drafts in every round would give 1.40.
        ("flat", 64, 1.25),
        ("flat", 128, 1.3),
        ("flat", 512, 1.35),
        # Two drafts in every round would give 1.37.
        ("an exit that has to read the prompt", 64, 1.15),
        ("an exit that has to read the prompt", 128, 1.2),
        ("an exit that has to read the prompt", 512, 1.28),
    ],
)
def test_what_pays_off_does_so_in_a_short_text(kind: str, tokens: int, least: float) -> None:
    machine = replace(KINDS[kind], accepted=0.6)
    assert speed(machine, tokens=tokens, seeds=16) > least


def test_a_second_text_drafts_at_once() -> None:
    machine, known = replace(KINDS["flat"], accepted=0.6, sure=0.6), Experience()
    Simulation(machine, tokens=64, seed=1, known=known)
    again = Simulation(machine, tokens=64, known=known)
    assert again.first_round == TRUSTED
    assert Simulation(machine, tokens=32, known=known).first_round == TRUSTED


PAYING = Machine(draft=0.2, above=0.8, more=0.05, accepted=0.8, sure=0.8)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_drafting_that_pays_off_goes_on(noise: float) -> None:
    found = Simulation(PAYING, tokens=512, noise=noise)
    assert found.speed > 1.5
    assert found.rounds > 100


@settings(max_examples=10)
@given(st.floats(0.02, 0.3), st.floats(0, 0.1), st.floats(0.7, 0.95), st.integers(0, 99))
def test_most_of_what_the_best_fixed_length_gains_is_gained(
    draft: float, more: float, accepted: float, seed: int
) -> None:
    machine = Machine(draft, 1 - draft, more=more, accepted=accepted, sure=accepted)
    best = max(
        sum(accepted**i for i in range(n + 1))
        / (n * draft + machine.below + machine.pass_over(n + 1))
        for n in range(1, 17)
    )
    found = sum(Simulation(machine, tokens=512, seed=seed + i).speed for i in range(4)) / 4
    assert found - 1 > 0.7 * (best - 1)


def test_a_second_draft_is_made_where_only_that_pays_off() -> None:
    # Two tokens at once take another kernel than one; from there on they are cheap.
    machine = Machine(draft=0.1, above=0.9, jump=0.7, accepted=0.75, sure=0.75)
    assert 1.75 / (0.1 + 0.1 + machine.pass_over(2)) < 1  # one draft at a time
    assert speed(machine, tokens=2048, seeds=4) > 1.2


def test_lengths_follow_the_costs() -> None:
    cheap = speed(Machine(0.05, 0.95, more=0.02, accepted=0.95, sure=0.95), tokens=512)
    dear = speed(Machine(0.3, 0.95, more=0.2, accepted=0.95, sure=0.95), tokens=512)
    assert cheap > dear > 1


def test_drafts_that_were_bad_are_tried_again_but_rarely() -> None:
    machine, known = Machine(0.2, accepted=0.0, sure=0.6), Experience()
    Simulation(machine, tokens=512, known=known)
    later = Simulation(machine, tokens=2048, known=known)
    assert 1 <= later.rounds <= 20
    # The text has become easy: drafts start again.
    easy = Simulation(replace(machine, accepted=0.9, sure=0.9), tokens=2 * FADING, known=known)
    assert easy.speed > 1.2


def paces(tokens: int = 512) -> Callable[[], Pace]:
    """Paces that share a ledger, after some plain steps of a second."""
    ledger = Ledger(tokens)
    for _ in range(TRUSTED):
        ledger.learn_plain(1.0)
    return lambda: Pace(ledger)


def test_depths_that_take_turns_share_what_may_be_lost() -> None:
    pace = paces()
    first, second = pace(), pace()
    for one in (first, second):
        one.prepare(0.0, 0.2)
        assert one.drafts()
    first.begin(1)
    first.goes_on([0.9])
    first.learn([0], [1.0], 2.0)
    assert not first.drafts()
    assert not second.drafts()


def test_a_draft_is_looked_for_only_where_it_is_affordable() -> None:
    looked: list[float] = []

    def look() -> float:
        looked.append(0.9)
        return 0.9

    pace = paces()()
    pace.prepare(0.0, 0.2, 0.1)
    assert pace.drafts(look)
    pace.learn([], [3.0], 0.0)  # that round has cost all that may be lost
    assert not pace.drafts(look)
    assert len(looked) == 1


def test_what_the_ledger_keeps_for_others_is_not_risked() -> None:
    make = paces()
    dear, cheap = make(), make()
    dear.prepare(0.0, 0.9, 0.9)
    cheap.prepare(0.0, 0.0, 0.3)
    assert dear.worst + cheap.worst > ADVANCE > dear.worst
    assert dear.drafts()
    assert not dear.drafts(None, cheap.worst)
    assert cheap.drafts()


@pytest.mark.parametrize(("ratio", "kept"), [(2.0, False), (1.1, True)])
def test_a_draft_is_given_up_if_a_few_blocks_show_that_it_costs_too_much(
    ratio: float, kept: bool
) -> None:
    pace = paces(64)()
    pace.prepare(0.0, 0.2, 0.1)
    assert pace.drafts()
    pace.begin(1)
    assert not pace.goes_on([0.9])  # the cost of one draft is not known yet
    assert pace.untried
    assert pace.bears(ratio, [0.2]) is kept
    pace.learn([1] if kept else [], [0.2], 1.0)
    assert not pace.untried
    assert pace.drafts() is kept


def test_what_unequal_rows_add_to_plain_steps_is_lost_by_drafting() -> None:
    ledger = Ledger(512)
    for _ in range(4):
        ledger.learn_plain(1.0)
    before = ledger.left
    ledger.learn_plain(1.5, uneven=True)
    assert ledger.plain.value == 1.0
    assert ledger.left == pytest.approx(before - 0.5)
    ledger.charge(0.25)
    assert ledger.left == pytest.approx(before - 0.75)


def test_what_is_lost_before_the_first_plain_step_counts() -> None:
    ledger = Ledger(64, before=20.0)
    ledger.charge(1.0)
    ledger.learn_plain(2.0)
    assert ledger.left == pytest.approx(SHARE * (64 + 10) - 0.5)


@pytest.mark.parametrize("rows", [2, 8])
def test_a_row_whose_drafts_are_never_right_does_not_make_the_others_wait(rows: int) -> None:
    out, ledger = Output(rows, 256, (), None), Ledger(256)
    pace, clock = Pace(ledger), 0.0
    pace.prepare(0.0, 0.2, 0.2)
    while out.active:
        if out.remaining == 1 or not pace.drafts():
            ledger.learn_plain(1.0)
            clock += 1
            out.emit([[0]] * len(out.active))
            continue
        pace.begin(len(out.active))
        n = 1
        while pace.goes_on([0.9] * len(out.active)) and n < min(16, out.remaining - 1):
            n += 1
        accepted = [0 if row == 0 else n for row in out.active]
        kept = [count + 1 for count in accepted]
        pace.learn(accepted, [0.2] * n, 1.0, out.nearer(kept))
        clock += 0.2 * n + 1.0
        out.emit([[0] * count for count in kept])
    assert clock <= 256 * 1.02


def test_the_next_text_of_a_model_starts_with_what_the_last_one_showed() -> None:
    model, known = nn.Linear(1, 1), Experience()
    Simulation(PAYING, tokens=512, known=known)
    assert not experience_of(model, "way").costs
    remember(model, "way", known)
    found = experience_of(model, "way")
    assert found.costs[1].verify(2) == known.costs[1].verify(2)
    assert found.lasting
    assert not experience_of(model, "another way").costs
    # Two texts may be written at once.
    found.costs.clear()
    assert experience_of(model, "way").costs


def test_a_new_number_of_rows_is_timed_anew() -> None:
    ledger = Ledger(512)
    pace = Pace(ledger)
    pace.prepare(0.0, 0.2)
    ledger.rows = 8
    for _ in range(TRUSTED):
        ledger.learn_plain(1.0)
    assert pace.drafts()
    ledger.rows = 7
    assert not pace.drafts()


def test_fewer_rows_start_with_the_costs_of_a_few_more_and_others_with_none() -> None:
    known = Experience()
    known.of(8).verified(1, 1.3)
    assert known.of(7).verify(1) == 1.3
    assert known.of(4).longest == 1
    assert known.of(1).longest == 0
    assert known.of(16).longest == 0


def test_always_means_always() -> None:
    pace = Pace(Ledger(8), always=True)
    assert pace.drafts()
    pace.begin(2)
    assert not pace.goes_on([0.9, 0.9])  # the cost of one draft is not known yet
    assert not pace.untried
    pace.learn([0, 0], [9.0], 9.0)
    assert pace.drafts()


def test_each_further_draft_is_expected_to_add_what_the_last_one_added() -> None:
    costs = Costs()
    assert costs.verify(1) == 1.0
    assert costs.worst(1) == 2.0
    costs.verified(1, 1.5)
    assert costs.verify(3) == 1.5
    assert costs.worst(3) == 3.5
    costs.verified(2, 1.75)
    assert (costs.verify(1), costs.verify(2), costs.verify(4)) == (1.5, 1.75, 2.25)
