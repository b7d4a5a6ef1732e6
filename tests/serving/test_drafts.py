"""Rows that draft do it together, only where it pays, and lose nothing when one of them leaves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.helpers.generation import DECODERS, decoder, talkative
from tests.helpers.talking import Talker
from torch import nn

import everydepth as ed
from everydepth.exits.generation.drafting import DraftHead
from everydepth.exits.generation.lookup import Lookup
from everydepth.exits.generation.pacing import Ledger, Pace
from everydepth.exits.generation.sampling import Draft, Sampling
from everydepth.serving import (
    Course,
    DepthTeam,
    Drafting,
    Plain,
    Request,
    Row,
    Scheduler,
    SharedBatch,
    TextTeam,
)
from everydepth.stream import ResidualStream, as_stream


def seconds(
    model: nn.Module, course_of: Callable[[ResidualStream, Callable[[], float]], Course]
) -> float:
    """What 200 tokens of one row take, if a call of a block is a second, a draft's words two and a
    look at the text a third."""
    stream, now = as_stream(model), [0.0]

    def tick(*_: Any) -> None:
        now[0] += 1

    def dear(head: DraftHead, *given: Any, **named: Any) -> Draft:
        now[0] += 2
        return draft(head, *given, **named)

    def looking(*given: Any) -> Lookup:
        now[0] += 1 / 3
        return Lookup(*given)

    draft = DraftHead.draft
    batch = SharedBatch(stream)
    batch.join(Row(course_of(stream, lambda: now[0]), [3, 4], limit=200))
    with ExitStack() as stack:
        stack.enter_context(patch.object(DraftHead, "draft", dear))
        stack.enter_context(patch("everydepth.serving.drafts.Lookup", looking))
        for block in stream.blocks:
            # A part of each block: the block itself is also called to learn how it is called.
            part = next(block.module.children())
            stack.callback(part.register_forward_pre_hook(tick).remove)
        while batch.rows:
            batch.round()
    return now[0]


def test_drafts_that_are_never_right_cost_next_to_nothing(talker: Talker) -> None:
    def drafting(stream: ResidualStream, clock: Callable[[], float]) -> Course:
        team = DepthTeam(stream, 1, stream.depth, clock=clock)
        return Drafting(team, prompt=[3, 4], tokens=200)

    def eager(stream: ResidualStream, clock: Callable[[], float]) -> Course:
        team = DepthTeam(stream, 1, stream.depth, clock=clock, always=True)
        return Drafting(team, prompt=[3, 4], tokens=200)

    def quoting(stream: ResidualStream, clock: Callable[[], float]) -> Course:
        team = TextTeam(stream, 0, stream.depth, clock=clock)
        return Drafting(team, prompt=[3, 4], tokens=200)

    plain = seconds(talker.model, lambda stream, _: Plain(stream.depth, Sampling()))
    assert plain <= seconds(talker.model, drafting) <= 1.02 * plain
    with patch.object(Pace, "rate", lambda *_: 0.0):  # it looks and never drafts
        assert plain < seconds(talker.model, quoting) <= 1.02 * plain
    assert seconds(talker.model, eager) > 1.02 * plain


def test_a_row_that_leaves_in_the_middle_of_drafts_leaves_the_others_their_tokens() -> None:
    model = talkative(decoder(DECODERS[0]))
    stream = as_stream(model)
    batch, team = SharedBatch(stream), DepthTeam(stream, 1, stream.depth, always=True)
    rows = [
        Row(Drafting(team, prompt=[3, 4, 5 + i], tokens=9), [3, 4, 5 + i], limit=9)
        for i in range(3)
    ]
    for row in rows:
        batch.join(row)
    for _ in range(200):
        batch.round()
        if team.drafted:
            break
    assert team.drafted, "two drafts in a row never came"
    batch.leave(rows[1])
    while batch.rows:
        batch.round()
    for i in (0, 2):
        told = {"max_new_tokens": 9, "eos_token_id": ()}
        assert rows[i].said == ed.generate(model, [3, 4, 5 + i], **told).tokens[0]


def test_rows_of_a_team_share_the_calls_of_a_round_of_drafts() -> None:
    stream = as_stream(talkative(decoder(DECODERS[0])))
    batch, team = SharedBatch(stream), DepthTeam(stream, 1, stream.depth, always=True)
    for i in range(4):
        prompt = [3, 4, 5 + i]
        batch.join(Row(Drafting(team, prompt=prompt, tokens=8), prompt, limit=8))
    batch.round()
    batch.round()  # one draft each
    assert batch.work.calls == 1
    batch.round()  # judged at once, with the token that follows
    assert batch.work.calls == stream.depth
    assert batch.work.readouts == 8


def test_rows_that_quote_themselves_get_several_tokens_in_one_round() -> None:
    # No block adds anything: a token is always followed by the same one, and a text goes round.
    model = talkative(decoder(DECODERS[0]), quiet_after=0, scale=0.0)
    stream = as_stream(model)
    batch, team = SharedBatch(stream), TextTeam(stream, 0, stream.depth, always=True)
    prompts = [[5 + i, 9, 12] * (2 + i) for i in range(3)]
    rows = [Row(Drafting(team, prompt=prompt, tokens=14), prompt, limit=14) for prompt in prompts]
    for row in rows:
        batch.join(row)
    rounds = 0
    while batch.rows:
        batch.round()
        rounds += 1
        assert batch.work.calls == stream.depth or rounds == 1  # rows share the calls of a round
    assert rounds < 9
    for row, prompt in zip(rows, prompts, strict=True):
        alone = ed.generate(model, prompt, max_new_tokens=14, eos_token_id=())
        assert row.said == alone.tokens[0]


def test_rounds_in_which_a_prompt_is_read_are_plain_and_teach_nothing() -> None:
    stream = as_stream(talkative(decoder(DECODERS[0]), quiet_after=0, scale=0.0))
    for draft_depth, kind in ((0, TextTeam), (1, DepthTeam)):
        batch, team = SharedBatch(stream, chunk=2), kind(stream, draft_depth, 4, always=True)
        first, second = [5, 9, 12] * 2, [3, 4] * 3
        row = Row(Drafting(team, prompt=first, tokens=20), first, limit=20)
        other = Row(Drafting(team, prompt=second, tokens=20), second, limit=20)
        batch.join(row)
        while len(row.said) < 2:
            batch.round()
        while team.drafted:  # its drafts are judged first
            batch.round()
        batch.join(other)
        with patch.object(Ledger, "learn_plain") as learned:
            for _ in range(3):
                before = len(row.said)
                batch.round()
                assert len(row.said) == before + 1
            assert len(other.said) == 1
        learned.assert_not_called()
        while batch.rows:
            batch.round()
        for one, prompt in ((row, first), (other, second)):
            told = {"max_new_tokens": 20, "eos_token_id": ()}
            assert one.said == ed.generate(stream, prompt, **told).tokens[0]


def test_requests_that_draft_get_the_text_of_the_full_depth_from_a_scheduler() -> None:
    model = talkative(decoder(DECODERS[0]))
    scheduler = Scheduler(as_stream(model), places=3)
    drawing = Sampling(do_sample=True, temperature=0.7)
    tickets = [
        scheduler.submit(
            Request(
                prompt=(3, 4, 5 + i),
                max_tokens=7,
                draft_depth=i % 3,
                sampling=drawing if i > 3 else Sampling(),
                seed=i if i > 3 else None,
            )
        )
        for i in range(6)
    ]
    while scheduler.step():
        pass
    for i, ticket in enumerate(tickets):
        drawn: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "seed": i} if i > 3 else {}
        alone = ed.generate(model, [3, 4, 5 + i], max_new_tokens=7, eos_token_id=(), **drawn)
        assert ticket.tokens == alone.tokens[0]


def test_rounds_are_measured_in_work_that_others_on_the_machine_do_not_prolong(
    talker: Talker,
) -> None:
    ticks, rounds = iter(range(1000)), list[float]()
    with (
        patch("everydepth.serving.drafts.thread_time", lambda: float(next(ticks))),
        patch.object(Pace, "drafts", lambda *_: False),
        patch.object(Ledger, "learn_plain", lambda _, seconds, **__: rounds.append(seconds)),
    ):
        scheduler = Scheduler(as_stream(talker.model))
        scheduler.submit(Request(prompt=(3, 4), max_tokens=9, draft_depth=0))
        while scheduler.step():
            pass
    assert len(rounds) > 3
    assert {*rounds} <= {1.0, 2.0}  # ticks


@pytest.mark.parametrize("words", [None, 20], ids=["all words", "likely words"])
def test_what_a_drafter_like_the_model_draws_is_accepted(words: int | None) -> None:
    model = talkative(decoder(DECODERS[0]))
    rest = as_stream(model).depth - 1
    stream = as_stream(ed.balcony(model, [1], blocks=rest).eval())  # copies of the last blocks
    drawing = Sampling(do_sample=True, temperature=0.9, top_k=4)
    generator = torch.Generator().manual_seed(0)
    team = DepthTeam(stream, 1, stream.depth, drawing, generator, always=True)
    batch, right = SharedBatch(stream), list[tuple[int, int]]()

    def learn(_: Pace, accepted: list[int], took: list[float], *__: Any) -> None:
        right.append((accepted[0], len(took)))

    with (
        patch.object(Pace, "goes_on", lambda *_: team.drafted < 3),
        patch.object(Pace, "learn", learn),
        patch("everydepth.serving.drafts.DraftHead", lambda *given: DraftHead(*given[:3], words)),
    ):
        for i in range(3):
            prompt = [3, 4 + i]
            batch.join(Row(Drafting(team, prompt=prompt, tokens=20), prompt, limit=20))
            while batch.rows:
                batch.round()
    accepted, drafted = map(sum, zip(*right, strict=True))
    assert drafted > 20
    # A word that is not in the list cannot be drafted; without the same random numbers, about half
    # of the drafts would be wrong.
    assert accepted == drafted if words is None else accepted > 0.8 * drafted


def test_a_balcony_that_is_the_rest_of_the_model_drafts_what_the_model_says() -> None:
    model = talkative(decoder(DECODERS[0]))
    rest = as_stream(model).depth - 1
    stream = as_stream(ed.balcony(model, [1], blocks=rest).eval())  # copies of the last blocks
    batch, team = SharedBatch(stream, chunk=4), DepthTeam(stream, 1, stream.depth, always=True)
    # Plain rounds in between: the balcony then has tokens to catch up on.
    turns, right = [True, False, False, True, False] * 9, list[tuple[list[int], list[float]]]()
    with (
        patch.object(Pace, "drafts", lambda *_: turns.pop()),
        patch.object(Pace, "goes_on", lambda *_: team.drafted < 3),
        patch.object(Pace, "learn", lambda _, accepted, took, *__: right.append((accepted, took))),
    ):
        for i in range(3):
            prompt = [3 + i] * (5 + i)
            batch.join(Row(Drafting(team, prompt=prompt, tokens=20), prompt, limit=20))
        while batch.rows:
            batch.round()
    assert len(right) > 2
    assert all(count == len(took) for accepted, took in right for count in accepted)


def test_on_a_busy_server_drafts_that_are_never_right_cost_next_to_nothing(talker: Talker) -> None:
    stream = as_stream(talker.model)

    def took(draft_depth: int | None) -> float:
        now = [0.0]

        def tick(_: nn.Module, given: tuple[Any, ...]) -> None:
            now[0] += 1 + given[0].shape[:2].numel() / 16  # 8 tokens cost half a call

        def dear(head: DraftHead, *given: Any, **named: Any) -> Draft:
            now[0] += 1
            return draft(head, *given, **named)

        draft = DraftHead.draft
        scheduler = Scheduler(stream, places=8, clock=lambda: now[0])
        for i in range(40):
            prompt = tuple(range(3, 6 + i % 5))
            scheduler.submit(Request(prompt=prompt, max_tokens=40 + i, draft_depth=draft_depth))
        with ExitStack() as stack:
            stack.enter_context(patch.object(DraftHead, "draft", dear))
            for block in stream.blocks:
                stack.callback(block.module.mlp.register_forward_pre_hook(tick).remove)
            while scheduler.step():
                pass
        return now[0]

    plain = took(None)
    assert plain < took(1) <= 1.02 * plain
    assert took(0) <= 1.02 * plain


def test_a_row_that_moves_between_two_drafts_is_judged_against_its_own() -> None:
    model = talkative(decoder(DECODERS[0]))
    rest = as_stream(model).depth - 1
    stream = as_stream(ed.balcony(model, [1], blocks=rest).eval())  # its drafts are always right
    batch, team = SharedBatch(stream), DepthTeam(stream, 1, stream.depth, always=True)
    # The last row takes the place of each of these, while the others draft.
    leaving = [Row(Plain(stream.depth, Sampling()), [3], limit=2 + i) for i in range(6)]
    prompts = [[3, 4, 5 + i] for i in range(4)]
    rows = [Row(Drafting(team, prompt=prompt, tokens=20), prompt, limit=20) for prompt in prompts]
    for row in (*leaving, *rows):
        batch.join(row)
    right = list[tuple[list[int], list[float]]]()
    with (
        patch.object(Pace, "goes_on", lambda *_: team.drafted < 3),
        patch.object(Pace, "learn", lambda _, accepted, took, *__: right.append((accepted, took))),
    ):
        while batch.rows:
            batch.round()
    assert len(right) > 2
    assert all(count == len(took) for accepted, took in right for count in accepted)
    for row, prompt in zip(rows, prompts, strict=True):
        told = {"max_new_tokens": 20, "eos_token_id": ()}
        assert row.said == ed.generate(model, prompt, **told).tokens[0]
