"""Drafting changes how fast tokens come, not which; and no block sees a token twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tests.helpers.generation import DECODERS, decoder, prompts, references, talkative

from everydepth.exits.generation import Generation
from everydepth.exits.generation import generate as decode
from everydepth.exits.generation.drafting import DraftHead
from everydepth.exits.generation.pacing import Pace
from everydepth.exits.generation.sampling import Sampling
from everydepth.exits.generation.tape import Tape
from everydepth.stream import as_stream
from everydepth.stream.balcony import Balcony

NEW = 20
# Whether drafting pays is another question (test_pacing.py): here it has to be right.
generate = partial(decode, draft_always=True)


@pytest.fixture(autouse=True)
def _cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """Costs that do not depend on how busy the machine is: a draft is a tenth of a check."""
    plainly = Pace.learn

    def learn(pace: Pace, accepted: Sequence[int], drafting: Sequence[float], *_: float) -> None:
        plainly(pace, accepted, [0.1] * len(drafting), 1.0)

    monkeypatch.setattr(Pace, "learn", learn)


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_drafts_the_same_tokens_in_a_batch_of_eight(name: str) -> None:
    model, rows = talkative(decoder(name), quiet_after=2), prompts(8)
    said = generate(model, rows, max_new_tokens=NEW, draft_depth=2, eos_token_id=())
    # Plain decoding has its own test against a reference without cache, batch and padding.
    assert said.tokens == generate(model, rows, max_new_tokens=NEW, eos_token_id=()).tokens
    assert said.stats.acceptance is not None
    assert 0 < said.stats.acceptance < 1  # some drafts were right and some wrong


def test_rows_stay_together_until_drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = talkative("Llama-untied-CausalLM-left", quiet_after=1), prompts(2)
    plainly, kept = Tape.reject, list[set[int]]()

    def reject(tape: Tape, counts: list[int], span: int) -> None:
        kept.append({*counts})
        plainly(tape, counts, span)
        assert not tape.uneven

    monkeypatch.setattr(Tape, "reject", reject)
    monkeypatch.setattr(Pace, "pays", False)
    said = generate(model, rows, max_new_tokens=NEW, draft_depth=3, eos_token_id=())
    assert said.tokens == references(model, rows, NEW)
    assert all(len(counts) == 1 for counts in kept)
    assert max(map(max, kept)) > 1  # several drafts were right at once


@pytest.mark.parametrize("reached", [1, 2, 3])
def test_tokens_can_be_taken_back_however_far_they_have_come(reached: int) -> None:
    model = talkative("Llama-untied-CausalLM-left", quiet_after=1)
    net = Balcony(model, depths=[2], blocks=1, init="last")
    ids = torch.tensor(prompts(2)[0])[None]
    real = torch.ones_like(ids, dtype=torch.bool)

    def begun() -> Tape:
        tape = Tape(as_stream(net), ids, real, top=4, room=32, read=[2])
        tape.last_logits(4)
        tape.feed(torch.tensor([5]))
        tape.advance(2)
        return tape

    with torch.no_grad():
        tape, plain = begun(), begun()
        for token in (7, 8):
            tape.feed(torch.tensor([token]))
            tape.advance(1)
        if reached > 1:
            tape.advance(reached)
        tape.forget(2)
        assert tape.length == plain.length
        assert torch.equal(tape.logits(4), plain.logits(4))
        for each in (tape, plain):
            each.feed(torch.tensor([9]))
        torch.testing.assert_close(tape.logits(2), plain.logits(2))
        torch.testing.assert_close(tape.logits(4), plain.logits(4))


def test_plain_steps_beside_an_exit_run_the_model_as_it_is() -> None:
    model = talkative("Llama-untied-CausalLM-left", quiet_after=1)
    rows, net = prompts(3), Balcony(model, depths=[2], blocks=1, init="last")
    # Nobody drafts at first, and the balcony has to see those tokens later.
    with pytest.MonkeyPatch.context() as patch:
        turns = [True] * NEW + [False] * 6
        patch.setattr(Pace, "drafts", lambda *_: turns.pop())
        said = decode(net, rows, max_new_tokens=NEW, draft_depth=2, eos_token_id=())
    assert said.tokens == references(model, rows, NEW)
    assert said.stats.draft_lengths


def test_all_depths_are_tried_if_drafts_are_always_made() -> None:
    model, rows = talkative("Llama-untied-CausalLM-left", quiet_after=1), prompts(2)
    told: dict[str, Any] = {"draft_depth": (1, 2, 3), "draft_always": True, "max_draft": 1}
    said = decode(model, rows, max_new_tokens=NEW, eos_token_id=(), **told)
    assert said.tokens == references(model, rows, NEW)
    assert min(said.stats.draft_depths.values()) > 0


def test_given_up_drafts_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = talkative("Llama-untied-CausalLM-left", quiet_after=1), prompts(3)
    monkeypatch.setattr(Pace, "drafts", lambda *_: True)
    monkeypatch.setattr(Pace, "untried", True)
    monkeypatch.setattr(Pace, "bears", lambda *_: False)
    said = decode(model, rows, max_new_tokens=NEW, draft_depth=1, eos_token_id=())
    assert said.tokens == references(model, rows, NEW)
    assert {*said.stats.draft_lengths} == {0}
    assert said.stats.drafted == 0


def test_a_draft_is_verified_after_a_few_blocks_were_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = talkative("Llama-untied-CausalLM-left", quiet_after=1), prompts(1)
    asked = list[float]()
    monkeypatch.setattr(Pace, "drafts", lambda *_: True)
    monkeypatch.setattr(Pace, "bears", lambda _, ratio, __: asked.append(ratio) or True)
    said = decode(model, rows, max_new_tokens=NEW, draft_depth=1, eos_token_id=())
    assert said.tokens == references(model, rows, NEW)
    assert len(asked) == 1  # from then on the cost is known
    assert asked[0] > 0


@pytest.mark.parametrize("draft_depth", [1, 2, 3])
def test_any_draft_depth_gives_the_same_tokens(draft_depth: int) -> None:
    model, rows = talkative("Llama-untied-CausalLM-left", quiet_after=1), prompts(3)
    said = generate(model, rows, max_new_tokens=NEW, draft_depth=draft_depth, eos_token_id=())
    assert said.tokens == references(model, rows, NEW)


def test_drafts_for_a_depth_below_the_last_give_the_tokens_of_that_depth() -> None:
    model, rows = talkative("Llama-tied-CausalLM-left", quiet_after=1), prompts(3)
    said = generate(model, rows, max_new_tokens=NEW, depth=3, draft_depth=1, eos_token_id=())
    assert said.tokens == references(model, rows, NEW, depth=3)
    assert len(said.stats.passes) == 3


def test_rows_that_stop_leave_the_batch_and_the_others_go_on() -> None:
    model, rows = talkative("Llama-tied-CausalLM-left", quiet_after=2), prompts(8)
    stop = references(model, rows[:1], NEW)[0][5]
    said = generate(model, rows, max_new_tokens=NEW, draft_depth=2, eos_token_id=stop)
    assert said.tokens == references(model, rows, NEW, stop=stop)
    assert min(said.lengths) < NEW == max(said.lengths)


def test_slots_of_rejected_tokens_are_taken_back_now_and_then() -> None:
    model = talkative("GPT2-CausalLM-left", quiet_after=2, scale=0.5)
    model.config.max_position_embeddings = 10**6  # only the table's size, below, counts here
    with torch.no_grad():
        table = model.transformer.wpe  # pyright: ignore[reportAttributeAccessIssue]
        table.weight = torch.nn.Parameter(table.weight.repeat(8, 1))  # pyright: ignore[reportAttributeAccessIssue]
    rows = prompts(8)
    drafted = generate(model, rows, max_new_tokens=150, draft_depth=2, eos_token_id=())
    assert drafted.tokens == generate(model, rows, max_new_tokens=150, eos_token_id=()).tokens
    assert drafted.stats.compactions > 0


def plain_steps(said: Generation) -> int:
    """The steps without drafts: the first token comes with the prompt."""
    lengths = said.stats.draft_lengths
    return said.stats.tokens - 1 - said.stats.accepted - len(lengths)


def test_prefix_and_suffix_see_every_token_once() -> None:
    model, rows = talkative("Llama-tied-CausalLM-left", quiet_after=2), prompts(1)
    generate(model, rows, max_new_tokens=2, draft_depth=2)  # its cache is tried once
    seen = [0] * 4

    def count(block: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            seen[block] += args[0].shape[1]

        return hook

    # Inside of the blocks: learning how a block is called is not a pass.
    handles = [
        block.branches[0].proj.register_forward_pre_hook(count(i))
        for i, block in enumerate(as_stream(model).blocks)
    ]
    said = generate(model, rows, max_new_tokens=NEW, draft_depth=2, eos_token_id=())
    for handle in handles:
        handle.remove()
    assert said.stats.passes == tuple(seen)
    assert len(set(seen)) == 1
    lengths = said.stats.draft_lengths
    assert seen[0] == len(rows[0]) + sum(lengths) + len(lengths) + plain_steps(said)


def test_a_draft_that_is_always_right_costs_no_pass_more_than_plain_decoding() -> None:
    model, rows = talkative("Llama-tied-CausalLM-left", quiet_after=2, scale=0.0), prompts(8)
    plain = generate(model, rows, max_new_tokens=NEW, eos_token_id=())
    drafted = generate(model, rows, max_new_tokens=NEW, draft_depth=2, eos_token_id=())
    assert drafted.stats.acceptance == 1
    assert drafted.stats.passes == plain.stats.passes
    assert drafted.tokens == plain.tokens


def test_the_draft_length_follows_acceptance() -> None:
    def mean_length(scale: float) -> float:
        model = talkative("Llama-tied-CausalLM-left", quiet_after=1, scale=scale)
        said = generate(model, prompts(1), max_new_tokens=24, draft_depth=1, eos_token_id=())
        assert said.stats.mean_draft_length is not None
        return said.stats.mean_draft_length

    assert mean_length(0.0) > 1.5 * mean_length(3.0)


def test_a_draft_over_a_part_of_the_vocabulary_gives_the_same_tokens() -> None:
    model, rows = talkative("Llama-tied-CausalLM-left", quiet_after=2), prompts(4)
    few = generate(
        model,
        rows,
        max_new_tokens=NEW,
        draft_depth=2,
        draft_always=True,
        draft_vocabulary=8,
        eos_token_id=(),
    )
    assert few.tokens == references(model, rows, NEW)
    assert few.stats.accepted > 0


def listed(head: DraftHead) -> list[int]:
    """The tokens that a draft may choose from."""
    head.draft(torch.zeros(1, 1, 32), None)
    ids = head._ids
    assert ids is not None
    return ids.tolist()


def test_a_draft_may_choose_what_is_in_the_text_is_likely_or_frequent_elsewhere() -> None:
    model = talkative("Llama-tied-CausalLM-left", quiet_after=2)
    drawing = partial(DraftHead, as_stream(model), 2, Sampling(do_sample=True), 8)
    logits = torch.zeros(2, as_stream(model).classes)
    logits[0, [40, 41]], logits[0, [50, 51]], logits[1, [50, 51]] = 9.0, -9.0, 9.0
    for words, others in ((None, set[int]()), (torch.tensor([7, 7, 9, 9, 30]), {7, 9})):
        head = drawing(words)
        head.see(torch.tensor([3, 4]), logits[:1])
        assert {3, 4, 40, 41} | others <= {*listed(head)}
        head.see(torch.tensor([3, 4]), logits[1:])  # remembered, as nothing was missing
        assert 50 not in listed(head)
        head.see(torch.tensor([5, 5]), logits)
        assert {3, 4, 5, 40, 41, 50, 51} <= {*listed(head)}


def test_words_of_other_text_change_no_token() -> None:
    model, rows = talkative("Llama-tied-CausalLM-left", quiet_after=2), prompts(2)
    told = {"max_new_tokens": NEW, "draft_depth": 2, "draft_vocabulary": 8, "eos_token_id": ()}
    said = generate(model, rows, **told, draft_words=torch.arange(5, 25))
    assert said.tokens == references(model, rows, NEW)
    assert said.stats.accepted > 0


def test_max_draft_is_the_most_that_is_drafted_in_a_round() -> None:
    model = talkative("Llama-tied-CausalLM-left", quiet_after=2, scale=0.0)
    said = generate(model, prompts(2), max_new_tokens=NEW, draft_depth=2, max_draft=3)
    assert max(said.stats.draft_lengths) == 3


def test_drafts_past_the_position_table_of_a_finished_row_do_no_harm() -> None:
    model = talkative("GPT2-CausalLM-left", quiet_after=2, scale=0.4)
    rows = [[5] * 20, [7] * 20, [9] * 20, [11] * 20]
    said = generate(model, rows, max_new_tokens=12, draft_depth=2, eos_token_id=())  # 32 positions
    assert said.tokens == references(model, rows, 12)
