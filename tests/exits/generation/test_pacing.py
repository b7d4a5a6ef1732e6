"""Drafting pays or stops: simulated costs and acceptance, no clock of this machine."""

from __future__ import annotations

import random

import pytest

from everydepth.exits.generation.pacing import ByLength, Pace

TOKENS = 512


def simulated(
    *,
    draft: float,
    more: float,
    judging: float = 1.0,
    accepted: float,
    confidence: float | None = None,
    tokens: int = TOKENS,
    noise: float = 0.0,
    seed: int = 0,
    longest: int = 16,
) -> tuple[float, int]:
    """Speed against plain steps of one second, and the rounds that drafted.

    draft: seconds of one. judging, more: seconds of verifying one token, and of each further one.
    """
    chance = random.Random(seed)
    pace, clock, written, rounds = Pace(tokens), 0.0, 0, 0

    def took(seconds: float) -> float:
        return seconds * (1 + noise * chance.random())

    while written < tokens:
        if not pace.drafts():
            seconds = took(1.0)
            pace.learn_plain(seconds)
            clock, written = clock + seconds, written + 1
            continue
        pace.begin(1)
        rounds += 1
        drafting, going = [took(draft)], True
        sure = accepted if confidence is None else confidence
        while going and len(drafting) < min(longest, tokens - written):
            going = pace.goes_on([sure])
            if going:
                drafting.append(took(draft))
        if going:
            pace.goes_on([sure])
        n = len(drafting)
        right = next((i for i in range(n) if chance.random() >= accepted), n)
        verifying = took(judging + more * (n - 1))
        pace.learn([right], drafting, verifying)
        clock += sum(drafting) + verifying
        written += min(right + 1, n)
    return tokens * (1 + noise / 2) / clock, rounds


WORST = [
    {"draft": 0.3, "more": 0.1, "accepted": 0.0},
    {"draft": 1.0, "more": 1.0, "accepted": 0.9},
    {"draft": 0.5, "more": 0.0, "judging": 1.5, "accepted": 0.3},
    {"draft": 0.9, "more": 0.5, "accepted": 0.5, "confidence": 0.99},
    {"draft": 0.2, "more": 0.9, "accepted": 0.2, "confidence": 0.95},
]


@pytest.mark.parametrize("costs", WORST)
@pytest.mark.parametrize("tokens", [64, 512])
def test_drafting_that_does_not_pay_costs_at_most_two_percent(
    costs: dict[str, float], tokens: int
) -> None:
    for seed in range(5):
        speed, _ = simulated(**costs, tokens=tokens, seed=seed)
        assert speed >= 0.98


def test_a_draft_that_costs_five_plain_steps_is_tried_once() -> None:
    # What the first draft of all costs cannot be foreseen: of 64 tokens it takes seven percent.
    for tokens, least in ((64, 0.92), (512, 0.98)):
        speed, _ = simulated(draft=5.0, more=2.0, accepted=1.0, tokens=tokens)
        assert speed >= least


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_drafting_that_pays_goes_on(noise: float) -> None:
    speed, rounds = simulated(draft=0.2, more=0.05, judging=0.8, accepted=0.8, noise=noise)
    assert speed > 1.4
    assert rounds > 50


def test_lengths_follow_the_costs() -> None:
    cheap, _ = simulated(draft=0.05, more=0.02, judging=0.95, accepted=0.95)
    dear, _ = simulated(draft=0.3, more=0.2, judging=0.95, accepted=0.95)
    assert cheap > dear > 1


def test_a_short_text_is_not_risked() -> None:
    assert simulated(draft=0.3, more=0.1, accepted=0.0, tokens=16) == (1.0, 0)


def test_always_means_always() -> None:
    pace = Pace(8, always=True)
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
