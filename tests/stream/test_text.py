"""Verbs take text where the stream knows a tokenizer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.helpers.generation import padded, prompts, talkative
from tests.helpers.words import Words

import everydepth as ed
from everydepth.errors import SettingError

WORDS = Words()


def test_trace_and_profile_of_text_are_those_of_its_tokens() -> None:
    model, rows = talkative("Llama-tied-CausalLM-left"), prompts(5)
    texts, batch = WORDS.texts(rows), padded(rows, "right")
    found = ed.trace(model, texts, ["loss"], tokenizer=WORDS, progress=False)
    np.testing.assert_allclose(
        found["loss"], ed.trace(model, batch, ["loss"], progress=False)["loss"], rtol=1e-9
    )
    stream = ed.as_stream(ed.as_stream(model), tokenizer=WORDS)
    profiled = ed.profile(stream, texts, repeats=1, progress=False)
    np.testing.assert_allclose(profiled["quality"], np.exp(found["loss"][1:]), rtol=1e-6)


def test_text_without_a_tokenizer_says_what_is_missing() -> None:
    model = talkative("Llama-tied-CausalLM-left")
    with pytest.raises(SettingError, match="but there is no tokenizer; pass tokenizer="):
        ed.trace(model, ["w5 w6"], ["loss"], progress=False)
    with pytest.raises(SettingError, match="has no tokens"):
        ed.trace(model, ["w5 w6", ""], ["loss"], tokenizer=WORDS, progress=False)


def test_a_token_grid_prints_as_a_grid() -> None:
    model = talkative("Llama-tied-CausalLM-left")
    grid = ed.token_grid(model, WORDS, "w5 w6 w7", new_tokens=2)
    lines = str(grid).splitlines()
    assert lines[0] == "Tokens"
    assert [line.split()[0] for line in lines[1:]] == ["4", "3", "2", "1", "0", "read"]
    last = [text.strip() for text in grid.arrays["text"][-1]]
    assert [cell.strip("␣") for cell in lines[1].split()[1:]] == last
    assert lines[-1].split()[1:4] == ["␣w5", "␣w6", "␣w7"]
    agree = grid.arrays["text"][0] == grid.arrays["text"][-1]
    assert lines[-2].split().count("·") == int(agree.sum())


def test_a_wide_grid_goes_on_below_and_no_line_is_too_long() -> None:
    from everydepth.results.grid import grid_lines

    model = talkative("Llama-tied-CausalLM-left")
    grid = ed.token_grid(model, WORDS, "w5 w6 w7", new_tokens=12)
    lines = list(grid_lines(grid, width=40))
    assert max(map(len, lines)) <= 40
    assert sum(line.startswith("read") for line in lines) > 1


def test_text_is_trained_on_as_its_tokens_are() -> None:
    rows = prompts(5)
    found: list[list[torch.Tensor]] = []
    for data, more in ((WORDS.texts(rows), {"tokenizer": WORDS}), (padded(rows, "right"), {})):
        model = talkative("Llama-tied-CausalLM-left")
        done = ed.fit(model, data, data, steps=2, lr=1e-2, progress=False, **more)
        assert done.steps == 2
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
