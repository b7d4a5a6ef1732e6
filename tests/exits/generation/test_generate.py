"""`generate` at any depth says what the model cut to that depth would say."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from tests.helpers.generation import (
    DECODERS,
    decoder,
    padded,
    prompts,
    reference,
    references,
    talkative,
)
from tests.zoo import PAD
from torch import nn

from everydepth.exits.generation import generate
from everydepth.stream import as_stream, at_depth

NEW = 12


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_says_what_it_says_without_cache_batch_and_padding(name: str) -> None:
    model, rows = talkative(decoder(name)), prompts(4)
    said = generate(model, rows, max_new_tokens=NEW, eos_token_id=())
    assert said.tokens == references(model, rows, NEW)


@pytest.mark.parametrize("name", DECODERS)
def test_at_depth_two_it_says_what_the_first_two_blocks_say(name: str) -> None:
    model, rows = talkative(decoder(name)), prompts(3)
    said = generate(model, rows, max_new_tokens=NEW, depth=2, eos_token_id=())
    assert said.tokens == references(at_depth(model, 2, share=True), rows, NEW)
    assert said.stats.passes == (sum(map(len, rows)) + 3 * (NEW - 1),) * 2


@pytest.mark.parametrize("name", ["GPT2", "OPT-prenorm", "Llama-tied", "Mistral-window"])
def test_it_says_what_transformers_own_generate_says(name: str) -> None:
    model, rows = talkative(decoder(name)), prompts(4)
    batch = padded(rows, "left")
    theirs = model.generate(  # pyright: ignore[reportCallIssue]
        **batch, max_new_tokens=NEW, do_sample=False, pad_token_id=PAD
    )
    ours = generate(model, batch, max_new_tokens=NEW)
    assert torch.equal(ours.sequences, theirs)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(side: str) -> None:
    model, rows = talkative("Llama-tied-CausalLM-left"), prompts(4)
    batch = padded(rows, side)
    said = generate(model, batch["input_ids"], attention_mask=batch["attention_mask"])
    assert said.tokens == generate(model, rows).tokens
    assert torch.equal(said.sequences[:, : said.prompt_length], padded(rows, "left")["input_ids"])


def test_a_row_stops_at_its_stop_token_and_is_padded_after_it() -> None:
    model, rows = talkative("Llama-tied-CausalLM-left"), prompts(5)
    free = references(model, rows, NEW)
    stop = free[0][4]
    said = generate(model, rows, max_new_tokens=NEW, eos_token_id=stop, pad_token_id=PAD)
    assert said.tokens == references(model, rows, NEW, stop=stop)
    assert said.lengths[0] <= 5 < max(said.lengths)
    assert said.sequences[0, said.prompt_length + said.lengths[0] :].eq(PAD).all()


@pytest.mark.parametrize("none", [-1, 10**6])
def test_a_config_that_names_no_token_for_padding_pads_with_one_the_model_has(none: int) -> None:
    model, rows = talkative("Llama-tied-CausalLM-left"), prompts(4)
    free = references(model, rows, NEW)
    model.config.pad_token_id = none  # pyright: ignore[reportAttributeAccessIssue]
    said = generate(model, rows, max_new_tokens=NEW, eos_token_id=free[0][4])
    assert said.tokens == references(model, rows, NEW, stop=free[0][4])
    assert said.sequences[0, said.prompt_length + said.lengths[0] :].eq(free[0][4]).all()


def test_several_stop_tokens_and_the_models_own() -> None:
    model, row = talkative("Llama-tied-CausalLM-left"), prompts(1)
    free = reference(model, row[0], NEW)[0]
    stops = [free[3], free[6]]
    assert generate(model, row, eos_token_id=stops).tokens == [free[: 1 + free.index(stops[0])]]
    model.generation_config.eos_token_id = stops  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    assert generate(model, row).tokens == [free[: 1 + free.index(stops[0])]]


@pytest.mark.parametrize("draft_depth", [None, 2])
def test_streaming_gives_every_token_once_and_in_order(draft_depth: int | None) -> None:
    model, rows = talkative("Llama-tied-CausalLM-left", quiet_after=2), prompts(4)
    heard: list[list[int]] = [[] for _ in rows]
    said = generate(
        model,
        rows,
        max_new_tokens=NEW,
        draft_depth=draft_depth,
        on_tokens=lambda row, tokens: heard[row].extend(tokens),
    )
    assert heard == said.tokens


def test_one_row_may_be_a_plain_list_or_a_vector() -> None:
    model, row = talkative("GPT2-CausalLM-left"), prompts(1)[0]
    expected = generate(model, [row]).tokens
    assert generate(model, row).tokens == expected
    assert generate(model, torch.tensor(row)).tokens == expected


def test_eager_attention_says_the_same() -> None:
    # In float32: transformers' eager attention gives NaN for left padding in float64.
    model, rows = talkative("Qwen2-window-CausalLM-left", quiet_after=2).float(), prompts(4)
    expected = references(model, rows, NEW)
    model.set_attn_implementation("eager")  # pyright: ignore[reportCallIssue]
    assert generate(model, rows, max_new_tokens=NEW, eos_token_id=()).tokens == expected
    drafted = generate(
        model, rows, max_new_tokens=NEW, eos_token_id=(), draft_depth=2, draft_always=True
    )
    assert drafted.tokens == expected


def test_a_model_in_training_mode_is_asked_in_eval_mode_and_comes_back_as_it_was() -> None:
    config = hf.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=32)
    model = hf.GPT2LMHeadModel(config).train()
    model.transformer.h[1].eval()
    modes = [module.training for module in model.modules()]
    first = generate(model, [3, 4, 5], draft_depth=1, eos_token_id=(), max_new_tokens=8)
    assert first.tokens == generate(model, [3, 4, 5], eos_token_id=(), max_new_tokens=8).tokens
    assert [module.training for module in model.modules()] == modes


class Halt(Exception):
    """Raised by a callback."""


def test_an_exception_in_the_callback_leaves_the_model_untouched() -> None:
    model = talkative("Llama-tied-CausalLM-left").train()
    before = [
        ("forward" in module.__dict__, len(module._forward_hooks)) for module in model.modules()
    ]

    def halt(row: int, tokens: list[int]) -> None:
        raise Halt

    with pytest.raises(Halt):
        generate(model, prompts(2), draft_depth=1, on_tokens=halt)
    after = [
        ("forward" in module.__dict__, len(module._forward_hooks)) for module in model.modules()
    ]
    assert before == after
    assert all(module.training for module in model.modules())


def test_the_result_can_be_trained_on() -> None:
    model = talkative("Llama-tied-CausalLM-left")
    said = generate(model, prompts(2), max_new_tokens=4)
    loss = model(input_ids=said.sequences, labels=said.sequences).loss
    loss.backward()
    assert as_stream(model).blocks[0].module.get_parameter("mlp.down_proj.weight").grad is not None


def test_bfloat16_runs_and_drafts() -> None:
    model, rows = talkative("Llama-tied-CausalLM-left").to(torch.bfloat16), prompts(3)
    for draft_depth in (None, 1):
        said = generate(model, rows, max_new_tokens=5, draft_depth=draft_depth, eos_token_id=())
        assert said.lengths == (5, 5, 5)


def test_wrapped_streams_and_models_are_the_same() -> None:
    model, rows = talkative("GPT2-CausalLM-left"), prompts(2)
    expected = generate(model, rows).tokens
    assert generate(as_stream(model), rows).tokens == expected
    assert generate(nn.DataParallel(model), rows).tokens == expected
