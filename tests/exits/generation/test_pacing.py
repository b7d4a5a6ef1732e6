"""Drafting pays or stops: simulated costs and acceptance, no clock of this machine."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everydepth.exits.generation.output import Output
from everydepth.exits.generation.pacing import IN_ADVANCE, RISKED, ByLength, Ledger, Pace

SHARE = st.floats(0, 1)


@dataclass(frozen=True)
class Machine:
    """Seconds, where a plain step takes one.

    draft: of one. judging, jump, more: of verifying one token, what several cost beyond that, and
    what each further one adds. accepted, sure: the chance of a draft, and the confidence that goes
    with it; None: the chance of each is its confidence, which varies.
    """

    draft: float
    judging: float = 1.0
    jump: float = 0.0
    more: float = 0.0
    accepted: float = 0.5
    sure: float | None = None

    def verify(self, n: int) -> float:
        return self.judging + (self.jump if n > 1 else 0) + self.more * (n - 1)

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
    machine: Machine, *, tokens: int, stop: int | None = None, noise: float = 0.0, seed: int = 0
) -> tuple[float, int]:
    """Speed against plain steps, and the rounds that drafted; it ends after `stop` tokens."""
    chance = random.Random(seed)
    ledger = Ledger(tokens)
    pace, clock, written, rounds = Pace(ledger), 0.0, 0, 0
    stop = tokens if stop is None else stop

    def took(seconds: float) -> float:
        return seconds * (1 + noise * chance.random())

    while written < stop:
        if not pace.drafts():
            seconds = took(1.0)
            ledger.learn_plain(seconds)
            clock, written = clock + seconds, written + 1
            continue
        pace.begin(1)
        rounds += 1
        drafting: list[float] = []
        confidences: list[float] = []
        going = True
        while going and len(drafting) < min(16, tokens - written):
            drafting.append(took(machine.draft))
            confidences.append(machine.confidence(chance))
            going = pace.goes_on(confidences[-1:])
        n = len(drafting)
        right = next((i for i, c in enumerate(confidences) if not machine.right(c, chance)), n)
        verifying = took(machine.verify(n))
        pace.learn([right], drafting, verifying)
        clock += sum(drafting) + verifying
        written += min(right + 1, n)
    return written * (1 + noise / 2) / clock, rounds


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
    # A round may have been given more tokens than were left, which count here.
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
    speed, _ = simulated(machine, tokens=2048)
    assert speed > 1.1


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
    assert (costs.at(1), costs.at(2), costs.at(5)) == (1.0, 1.5, 3.0)
    assert (costs.most(2), costs.most(5)) == (1.5, 4.0)  # those not seen as single ones
