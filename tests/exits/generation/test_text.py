"""Text in, text out: the same tokens, whatever form the prompt has."""

from __future__ import annotations

from contextlib import closing
from copy import deepcopy
from typing import Any, cast

import pytest
import torch
from tests.helpers.generation import padded, prompts, talkative
from tests.helpers.tokenizing import sentencepiece
from tests.helpers.words import Words
from tokenizers import decoders
from torch import nn
from transformers import GenerationConfig

from everydepth.errors import BatchError, SettingError
from everydepth.exits.generation import generate, stream_text
from everydepth.exits.generation.text import TextStream
from everydepth.stream import as_stream

NEW = 9
WORDS = Words()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return talkative("Llama-tied-CausalLM-left", quiet_after=2)


def test_strings_lists_and_a_tokenizers_output_give_the_same_tokens(model: nn.Module) -> None:
    rows = prompts(3)
    plain = generate(model, rows, max_new_tokens=NEW, eos_token_id=())
    said = generate(model, WORDS.texts(rows), tokenizer=WORDS, max_new_tokens=NEW, eos_token_id=())
    assert said.tokens == plain.tokens
    assert said.texts == tuple(WORDS.decode(row) for row in plain.tokens)
    assert str(said) == "\n".join(said.texts)
    by_keywords = generate(model, **padded(rows, "right"), max_new_tokens=NEW, eos_token_id=())
    assert by_keywords.tokens == plain.tokens
    one = generate(model, WORDS.text(rows[0]), tokenizer=WORDS, max_new_tokens=NEW, eos_token_id=())
    assert one.text == said.texts[0]


@pytest.mark.parametrize("kind", ["lists", "arrays"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_tokenizers_output_needs_no_tensors(model: nn.Module, side: str, kind: str) -> None:
    rows = prompts(3)
    plain = generate(model, rows, max_new_tokens=NEW, eos_token_id=())
    tensors = padded(rows, side)
    given = {k: v.tolist() if kind == "lists" else v.numpy() for k, v in tensors.items()}
    told: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": ()}
    assert generate(model, **given, **told).tokens == plain.tokens
    assert generate(model, given, **told).tokens == plain.tokens
    ragged = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
    assert generate(model, **ragged, **told).tokens == plain.tokens
    single = {key: value[0] for key, value in ragged.items()}
    assert generate(model, **single, **told).tokens == plain.tokens[:1]


def test_text_needs_no_tokenizer_where_the_stream_has_one(model: nn.Module) -> None:
    text = WORDS.text(prompts(1)[0])
    told: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": ()}
    stream = as_stream(model, tokenizer=WORDS)
    said = generate(model, text, tokenizer=WORDS, **told)
    assert generate(stream, text, **told).texts == said.texts
    assert "".join(stream_text(stream, text, **told)) == said.text


def test_leaving_a_text_early_stops_the_model() -> None:
    model = talkative("Llama-tied-CausalLM-left").train()
    seen: list[int] = []
    told: dict[str, Any] = {"max_new_tokens": 25, "eos_token_id": ()}
    pieces = stream_text(
        model, "w5", tokenizer=WORDS, on_tokens=lambda _, new: seen.extend(new), **told
    )
    with closing(cast(Any, pieces)):
        next(pieces)
        assert not model.training  # it still runs, or waits to
    assert model.training
    there = len(seen)
    assert next(pieces, None) is None
    assert len(seen) == there


@pytest.mark.parametrize("draft_depth", [None, 2])
def test_a_stop_string_ends_a_text_and_is_not_part_of_it(
    model: nn.Module, draft_depth: int | None
) -> None:
    prompt = WORDS.text(prompts(1)[0])
    settings = {"tokenizer": WORDS, "max_new_tokens": NEW, "eos_token_id": ()}
    whole = generate(model, prompt, **settings).text
    words = whole.split()
    stop = f"{words[3]} {words[4]}"
    first = whole.index(stop)
    said = generate(
        model, prompt, stop=stop, draft_depth=draft_depth, draft_always=True, **settings
    )
    assert said.text == whole[:first]
    assert len(said.tokens[0]) <= 5


def test_pieces_come_while_the_text_grows_and_add_up_to_it(model: nn.Module) -> None:
    rows = WORDS.texts(prompts(2))
    pieces: dict[int, list[str]] = {0: [], 1: []}
    settings = {"tokenizer": WORDS, "max_new_tokens": NEW, "eos_token_id": ()}
    said = generate(
        model, rows, on_text=lambda row, piece: pieces[row].append(piece), stop="w9999", **settings
    )
    assert tuple("".join(parts) for parts in pieces.values()) == said.texts
    assert len(pieces[0]) > 3
    assert "".join(stream_text(model, rows[0], **settings)) == said.texts[0]


def test_an_error_while_streaming_is_raised_where_it_is_read(model: nn.Module) -> None:
    with pytest.raises(SettingError, match="max_new_tokens 0"):
        next(stream_text(model, "w5", tokenizer=WORDS, max_new_tokens=0))
    with pytest.raises(SettingError, match="pass one string"):
        next(stream_text(model, ["w5"], tokenizer=WORDS))


def test_a_generation_config_says_what_the_arguments_leave_open(model: nn.Module) -> None:
    row = prompts(1)
    config = GenerationConfig(max_new_tokens=4, do_sample=True, temperature=0.7, top_p=0.9)
    said = generate(model, row, generation_config=config, eos_token_id=(), seed=3)
    same = generate(
        model,
        row,
        max_new_tokens=4,
        do_sample=True,
        temperature=0.7,
        top_k=config.top_k,
        top_p=0.9,
        eos_token_id=(),
        seed=3,
    )
    assert said.tokens == same.tokens
    more = generate(model, row, generation_config=config, max_new_tokens=6, eos_token_id=(), seed=3)
    assert more.lengths == (6,)


def test_the_most_tokens_in_all_count_the_prompt(model: nn.Module) -> None:
    rows = prompts(3)
    longest = max(map(len, rows))
    told: dict[str, Any] = {"eos_token_id": ()}
    said = generate(model, rows, generation_config=GenerationConfig(max_length=longest + 4), **told)
    assert said.lengths == (4, 4, 4)
    both = GenerationConfig(max_length=longest + 4)
    more = generate(model, rows, generation_config=both, max_new_tokens=6, **told)
    assert more.lengths == (6, 6, 6)
    beyond = generate(model, rows, generation_config=GenerationConfig(max_length=9999), **told)
    assert longest + beyond.lengths[0] == as_stream(model).positions
    words = rf"max_length is 2, but there are {longest} tokens before the first new one; raise it"
    with pytest.raises(BatchError, match=words):
        generate(model, rows, generation_config=GenerationConfig(max_length=2), **told)


def test_the_models_own_generation_config_can_be_given(model: nn.Module) -> None:
    own: Any = deepcopy(cast(Any, model).generation_config)
    own.update(output_attentions=False, output_hidden_states=False)  # as some models have them
    plain = generate(model, [[5]], max_new_tokens=NEW)
    assert generate(model, [[5]], max_new_tokens=NEW, generation_config=own).tokens == plain.tokens


def test_what_it_cannot_do_is_refused(model: nn.Module) -> None:
    with pytest.raises(SettingError, match="num_beams, which generate does not support"):
        generate(model, [[5]], generation_config=GenerationConfig(num_beams=4))
    with pytest.raises(SettingError, match=r"does not support \(pass stop= instead\); use max_new"):
        generate(model, [[5]], generation_config=GenerationConfig(stop_strings=["w7"]))
    with pytest.raises(SettingError, match="no tokenizer; pass tokenizer="):
        generate(model, "w5")
    with pytest.raises(SettingError, match="pass tokenizer= as well"):
        generate(model, [[5]], stop="w7")
    with pytest.raises(SettingError, match="either prompts or input_ids"):
        generate(model, [[5]], input_ids=torch.tensor([[5]]))
    with pytest.raises(SettingError, match="there is no text without a tokenizer"):
        _ = generate(model, [[5]], max_new_tokens=2).text


@pytest.mark.parametrize(
    "text", ["世界の" * 12, "a🙂" * 9 + "é🙂🙂" * 9], ids=["three bytes each", "one to four"]
)
def test_pieces_add_up_to_the_text_though_characters_are_several_tokens(text: str) -> None:
    tokenizer = sentencepiece()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(parts)
    ids = tokenizer(text)["input_ids"]
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert whole.strip() == text
    for first in range(len(ids)):
        prompt = tokenizer.decode(ids[:first], skip_special_tokens=True)
        if "\N{REPLACEMENT CHARACTER}" in prompt:
            continue  # it ends inside a character
        stream = TextStream(tokenizer, before=ids[:first])
        pieces = [stream.add([token]) for token in ids[first:]]
        assert prompt + "".join(pieces) + stream.add([], last=True) == whole


def test_a_long_stop_string_is_compared_only_as_far_as_there_is_text() -> None:
    cuts: list[object] = []

    class Stop(str):
        def __getitem__(self, part: object) -> str:
            cuts.append(part)
            return super().__getitem__(part)  # pyright: ignore[reportArgumentType]

    stream = TextStream(WORDS, [Stop("y" * 20_000)])
    text = "".join(stream.add([token]) for token in (5, 6, 7)) + stream.add([], last=True)
    assert text == WORDS.decode([5, 6, 7])
    assert len(cuts) <= len(text)
