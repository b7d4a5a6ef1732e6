"""Verbs take text where the stream knows a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.generation import padded, prompts, talkative
from tests.helpers.words import Words
from tests.zoo import ENTRIES

import everydepth as ed
from everydepth.errors import SettingError
from everydepth.exits.certify import certify_depth
from everydepth.stream import Feed

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


QUIET: dict[str, Any] = {"progress": False}
TEXTS = WORDS.texts(prompts(10))
# Verbs of a language model and of a classifier, with texts in place of data.
WRITERS: dict[str, Callable[[Any], Any]] = {
    "observe": lambda s: s.observe(TEXTS).logits(1),
    "check_stream": lambda s: ed.check_stream(s, TEXTS).raise_if_failed(),
    "choose_blocks": lambda s: ed.choose_blocks(s, TEXTS, keep=1, **QUIET),
    "certify_depth": lambda s: certify_depth(s, TEXTS, risk=0.9, delta=0.5, **QUIET),
    "ablate": lambda s: ed.ablate(s, TEXTS, c=(0.0, 1.0), **QUIET),
    "score": lambda s: ed.growth.score(s, TEXTS, **QUIET),
    "jumpboard": lambda s: ed.growth.jumpboard(s, TEXTS, after=1, **QUIET),
    "paired": lambda s: ed.growth.paired(s, s, TEXTS),
    "compare": lambda s: ed.growth.compare(
        s, TEXTS, TEXTS, steps=1, evaluations=1, seeds=(0,), arms=("longer", "stacked"), **QUIET
    ),
    "grow": lambda s: ed.grow(s, TEXTS, TEXTS, TEXTS, steps=1, rounds=1, **QUIET),
    "fit": lambda s: ed.fit(s, TEXTS, TEXTS, steps=1, batch_size=2, **QUIET),
    "onnx": lambda s: ed.export(s, "onnx", format="onnx", example=TEXTS),
}
LABELED = (TEXTS, [0, 1] * 5)
CLASSIFIERS: dict[str, Callable[[Any], Any]] = {
    "predict": lambda s: ed.predict(s, TEXTS[:2], policy=ed.Confidence(threshold=0.5)),
    "evaluate": lambda s: ed.evaluate(s, LABELED, ed.Confidence(threshold=0.5)),
    "calibrate": lambda s: ed.calibrate(
        s, (TEXTS * 12, [0, 1] * 60), risk=0.9, delta=0.5, against="labels", **QUIET
    ),
    "audit": lambda s: ed.audit(s, LABELED, **QUIET),
    "linear_probe": lambda s: ed.linear_probe(s, LABELED, LABELED, **QUIET),
    "memorization": lambda s: ed.memorization(s, LABELED, flipped=[1], **QUIET),
    "gradient_study": lambda s: ed.gradient_study(s, LABELED, LABELED, flipped=[1], **QUIET),
}


@pytest.mark.parametrize("verb", [*WRITERS, *CLASSIFIERS])
def test_every_verb_takes_text(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "Llama-tied-CausalLM-left" if verb in WRITERS else "Bert-SequenceClassification"
    model, _ = ENTRIES[name].make()
    {**WRITERS, **CLASSIFIERS}[verb](ed.as_stream(model, tokenizer=WORDS))


def test_labeled_text_is_measured_as_its_tokens_are() -> None:
    model, rows = ENTRIES["Bert-SequenceClassification"].make()[0], prompts(10)
    labels = torch.tensor(LABELED[1])
    plain = ed.trace(model, {**padded(rows, "right"), "labels": labels}, ["loss"], **QUIET)
    pairs = list(zip(TEXTS, LABELED[1], strict=True))
    for data in (LABELED, (tuple(TEXTS), labels), pairs):
        found = ed.trace(model, data, ["loss"], tokenizer=WORDS, **QUIET)
        np.testing.assert_allclose(found["loss"], plain["loss"], rtol=1e-6)


def test_a_batch_of_text_is_as_long_as_its_longest_row() -> None:
    stream = ed.as_stream(talkative("Llama-tied-CausalLM-left"), tokenizer=WORDS)
    feed = Feed(["w5 w6", "w7", "w5 w6 w7 w8 w9", "w5"], stream, batch_size=2)
    assert [tuple(batch["input_ids"].shape) for batch in feed] == [(2, 2), (2, 5)]
    profiled = ed.profile(stream, TEXTS, batch_size=2, repeats=1, **QUIET)
    assert profiled.batch_size == 2


def test_a_stream_made_as_another_was_knows_its_tokenizer() -> None:
    stream = ed.as_stream(talkative("Llama-tied-CausalLM-left"), tokenizer=WORDS)
    cut = ed.as_stream(ed.at_depth(stream, 2), **stream.options)
    assert cut.tokenizer is WORDS
    again = ed.as_stream(ed.as_stream(stream.model), tokenizer=WORDS)
    assert again.options == stream.options
