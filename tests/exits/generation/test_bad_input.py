"""Bad input: the value received, what is allowed, what to do next."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.zoo import CAUSAL, CLASSIFIERS, ENTRIES

from everydepth.errors import BatchError, DepthError, SettingError, UnsupportedModelError
from everydepth.exits.generation import generate
from everydepth.exits.policies import Confidence
from everydepth.stream import as_stream

MODEL = CAUSAL["Llama-tied-CausalLM-left"]
PROMPT = torch.tensor([[5, 6, 7], [8, 9, 10]])


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({"depth": 0}, DepthError, "depth 0, but LlamaForCausalLM has 4 blocks; use 1 to 4"),
        ({"depth": 5}, DepthError, "depth 5, but LlamaForCausalLM has 4 blocks; use 1 to 4"),
        ({"depth": -1}, DepthError, "depth -1, but"),
        (
            {"draft_depth": 4},
            DepthError,
            "draft_depth 4, but it must be below depth 4, which decides; use 0 to draft from the "
            "text itself, or 1 to 3 for that many blocks",
        ),
        ({"draft_depth": (0, -1)}, DepthError, "draft_depth -1, but it must be below"),
        ({"draft_depth": 2, "depth": 2}, DepthError, "below depth 2, .*, or 1 to 1 for"),
        ({"draft_depth": 1, "depth": 1}, DepthError, "use 0 to draft from the text itself$"),
        (
            {"draft_depth": 1, "policy": Confidence(threshold=0.5)},
            SettingError,
            "draft_depth=1 with a policy: .* choose one",
        ),
        (
            {"max_new_tokens": 30},
            BatchError,
            "3 prompt tokens \\+ 30 new ones = 33, but LlamaForCausalLM has 32 positions; "
            "lower max_new_tokens to 29",
        ),
        ({"max_new_tokens": 0}, SettingError, "max_new_tokens 0; use 1 or more"),
        ({"max_draft": 0, "draft_depth": 1}, SettingError, "max_draft 0; use 1 or more"),
        ({"draft_vocabulary": 61}, SettingError, "draft_vocabulary 61, .* knows 60 .*use 1 to 60"),
        ({"draft_words": [0, 60]}, SettingError, "draft_words from 0 to 60, .* use 0 to 59"),
        ({"draft_words": ()}, SettingError, "draft_words has 0 values .* pass token ids"),
        (
            {"temperature": 0.0, "do_sample": True},
            SettingError,
            "temperature=0.0; use a number above 0",
        ),
        ({"top_k": 0, "do_sample": True}, SettingError, "top_k=0; use 1 or more"),
        ({"top_p": 1.5, "do_sample": True}, SettingError, "top_p=1.5; use a number above 0"),
        ({"temperature": 0.5}, SettingError, "with do_sample=False; pass do_sample=True"),
        (
            {"seed": 1, "generator": torch.Generator(), "do_sample": True},
            SettingError,
            "seed=1 and a generator .* pass one",
        ),
        (
            {"attention_mask": torch.tensor([[1, 1, 1], [1, 0, 1]])},
            BatchError,
            r"row 1 of attention_mask is \[1, 0, 1\]; padding must be on the left .* without gaps",
        ),
        (
            {"attention_mask": torch.tensor([[1, 1, 1], [0, 1, 0]])},
            BatchError,
            r"row 1 of attention_mask is \[0, 1, 0\]; padding must be on the left",
        ),
        (
            {"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])},
            BatchError,
            "row 1 of the prompt is all padding; pass at least one token per row",
        ),
        (
            {"attention_mask": torch.ones(2, 4)},
            BatchError,
            r"attention_mask has shape \(2, 4\), but the prompt has \(2, 3\)",
        ),
    ],
)
def test_a_bad_setting_is_named_with_what_is_allowed(
    setting: dict[str, Any], error: type[Exception], message: str
) -> None:
    model, _ = MODEL.make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = model.config.to_dict()  # pyright: ignore[reportCallIssue]
    with pytest.raises(error, match=message):
        generate(model, PROMPT, **setting)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config.to_dict() == config  # pyright: ignore[reportCallIssue]
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (torch.zeros(2, 0, dtype=torch.long), r"the prompt is empty: shape \(2, 0\)"),
        (torch.zeros(0, 3, dtype=torch.long), r"the prompt is empty: shape \(0, 3\)"),
        ([], "the prompt is empty: no rows"),
        ([[3], []], "the prompt is empty: row 1 has no tokens"),
        (torch.rand(2, 3), "type torch.float32; pass whole numbers of shape"),
        (torch.zeros(1, 2, 3, dtype=torch.long), r"has shape \(1, 2, 3\)"),
        ([[3, 60]], "token 60, but the vocabulary of LlamaForCausalLM has 60; use 0 to 59"),
        ([[3, -1]], "token -1, but the vocabulary of LlamaForCausalLM has 60; use 0 to 59"),
        ({"ids": PROMPT}, r"has keys \['ids'\], but 'input_ids' is needed"),
        (torch.full((1, 32), 5), "32 prompt tokens .* shorten the prompt to 31 tokens or fewer"),
    ],
)
def test_a_bad_prompt_is_named_with_what_is_allowed(prompt: Any, message: str) -> None:
    model, _ = MODEL.make()
    with pytest.raises(BatchError, match=message):
        generate(model, prompt)


def test_a_mask_that_does_not_fit_the_lists_of_tokens_is_refused() -> None:
    model, _ = MODEL.make()
    words = r"attention_mask has rows of 3 values, but the prompt has rows of 2 tokens; pass one"
    with pytest.raises(BatchError, match=words):
        generate(model, [[3, 4]], attention_mask=torch.ones(1, 3))


@pytest.mark.parametrize("name", ["Bert-MaskedLM", "ViT", next(iter(CLASSIFIERS))])
def test_a_model_that_does_not_predict_the_next_token_is_refused(name: str) -> None:
    model, _ = ENTRIES[name].make()
    with pytest.raises(UnsupportedModelError, match="not the next token; load the model with"):
        generate(model, PROMPT)


def test_attention_that_cannot_leave_out_tokens_is_refused() -> None:
    model, _ = MODEL.make()
    stream = as_stream(model)
    model.config._attn_implementation = "flash_attention_2"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UnsupportedModelError, match="load it with attn_implementation='sdpa'"):
        generate(stream, PROMPT)
    # Without its kernels the model cannot even be looked at.
    with pytest.raises(UnsupportedModelError, match="does not run on a made-up batch"):
        as_stream(model)


@pytest.mark.parametrize("prompt", [(None,), [[1, None]], [[1.5, 2]]])
def test_tokens_that_are_no_whole_numbers_are_refused(
    prompt: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    model, _ = MODEL.make()
    with pytest.raises(BatchError, match=r"token (None|1.5); pass whole numbers, or text with"):
        generate(model, prompt)  # type: ignore[arg-type]


def test_prompts_may_be_tensors_of_several_lengths_and_unsigned_tokens() -> None:
    model, _ = MODEL.make()
    rows = [[3, 4, 5], [6, 7]]
    expected = generate(model, rows, max_new_tokens=3)
    for kind in (torch.int64, torch.uint16):
        found = generate(model, [torch.tensor(row).to(kind) for row in rows], max_new_tokens=3)
        assert torch.equal(found.sequences, expected.sequences)
    tokens = np.array(rows[:1], dtype=">u2")
    one = generate(model, rows[:1], max_new_tokens=3)
    assert torch.equal(generate(model, tokens, max_new_tokens=3).sequences, one.sequences)
