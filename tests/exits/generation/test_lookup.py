"""Drafts from the text itself: what followed the same tokens before."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.generation import DECODERS, decoder, prompts, references, talkative

from everydepth.exits.generation import generate
from everydepth.exits.generation.lookup import GRAM, LONGEST, Lookup, Text

NEW = 20
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def agreeing(tokens: list[int], place: int) -> int:
    """How many tokens before this place are those at the end."""
    most = min(place, LONGEST)
    return next((n for n in range(most) if tokens[place - n - 1] != tokens[-n - 1]), most)


@given(TEXTS, st.integers(0, 20))
def test_a_match_is_the_latest_of_those_that_agree_best_in_a_few_tokens(
    tokens: list[int], at_first: int
) -> None:
    text = Text(tokens[:at_first])
    text.extend(tokens[at_first:])  # a text grows
    lengths = {place: agreeing(tokens, place) for place in range(1, len(tokens))}
    best = max((min(n, GRAM) for n in lengths.values()), default=0)
    place = max((p for p, n in lengths.items() if best and min(n, GRAM) == best), default=0)
    assert text.match() == (place, lengths.get(place, 0))


@given(TEXTS, st.integers(0, 59), st.integers(1, 20))
def test_what_follows_is_what_a_text_that_repeats_itself_would_say(
    tokens: list[int], place: int, count: int
) -> None:
    place = min(place, len(tokens) - 1)
    longer = list(tokens)
    for _ in range(count):
        longer.append(longer[place + len(longer) - len(tokens)])
    assert Text(tokens).following(place, count) == longer[len(tokens) :]


def test_a_longer_match_is_trusted_more_and_a_row_without_one_not_at_all() -> None:
    found = Lookup([Text([5, 6, 7, 8, 5, 6, 7]), Text([6, 7, 8, 5, 7]), Text([1, 2, 3])], 4)
    assert found.agree == (3, 1, 0)
    first, second = found.confidence(0), found.confidence(1)
    assert first[0] > first[1] > first[2] == 0
    assert second[0] > first[0]
    assert second[2] == 0
    drafts = [found.draft(i, torch.device("cpu")).tokens.tolist() for i in range(4)]
    assert drafts == [[8, 8, 3], [5, 5, 3], [6, 7, 3], [7, 8, 3]]


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_says_the_same_with_drafts_from_its_text(name: str) -> None:
    model, rows = talkative(decoder(name), quiet_after=2), prompts(8)
    plain = generate(model, rows, max_new_tokens=NEW, eos_token_id=())
    said = generate(
        *(model, rows),
        max_new_tokens=NEW,
        draft_depth=0,
        draft_always=True,
        eos_token_id=(),
    )
    assert said.tokens == plain.tokens
    assert said.stats.draft_depths[0] > 0


def test_a_depth_drafts_where_the_text_has_nothing_to_say() -> None:
    # No block adds anything: a token is always followed by the same one, and the text goes round.
    model, rows = talkative("Llama-untied-CausalLM-left", quiet_after=0, scale=0.0), [[3, 4, 5, 6]]
    said = generate(
        *(model, rows),
        max_new_tokens=NEW,
        draft_depth=(2, 0),
        draft_always=True,
        max_draft=1,
        eos_token_id=(),
    )
    assert said.tokens == references(model, rows, NEW)
    assert all(rounds > 0 for rounds in said.stats.draft_depths.values())


def test_a_text_that_repeats_itself_takes_fewer_passes() -> None:
    model = talkative("Llama-untied-CausalLM-left", quiet_after=0, scale=0.0)
    row = [[5, 9, 12] * 3]  # no block adds anything: the same token is always followed by another
    plain = generate(model, row, max_new_tokens=NEW, eos_token_id=())
    # Once the text goes round, every draft is right.
    said = generate(model, row, max_new_tokens=NEW, eos_token_id=(), draft_depth=0)
    always = generate(
        model, row, max_new_tokens=NEW, eos_token_id=(), draft_depth=0, draft_always=True
    )
    assert said.tokens == plain.tokens == always.tokens == references(model, row, NEW)
    assert always.stats.drafted - always.stats.accepted <= 3
    assert len(always.stats.draft_lengths) <= 3 + NEW / 2


def test_nothing_is_drafted_after_a_token_that_is_new() -> None:
    model = talkative("Llama-untied-CausalLM-left")
    plain = generate(model, [3, 4, 5], max_new_tokens=6, eos_token_id=()).tokens
    text = [3, 4, 5, *plain[0]]
    met = sum(text[i] in text[:i] for i in range(3, len(text) - 2))  # the last one is never drafted
    said = generate(
        model, [3, 4, 5], max_new_tokens=6, eos_token_id=(), draft_depth=0, draft_always=True
    )
    assert said.tokens == plain
    assert len(said.stats.draft_lengths) <= met


def test_rows_leave_and_depths_below_the_last_decide_as_without_drafts() -> None:
    model, rows = talkative("Llama-tied-CausalLM-left", quiet_after=2), prompts(8)
    stop = references(model, rows[:1], NEW, depth=3)[0][5]
    said = generate(
        *(model, rows),
        max_new_tokens=NEW,
        depth=3,
        draft_depth=(0, 1),
        draft_always=True,
        eos_token_id=stop,
    )
    assert said.tokens == references(model, rows, NEW, depth=3, stop=stop)
    assert min(said.lengths) < NEW
