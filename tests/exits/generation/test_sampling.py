"""Sampling draws from the distribution it says, with drafts and without."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers as hf
from scipy.stats import chisquare
from torch import Tensor
from transformers.generation import logits_process

from everydepth.exits.generation import generate
from everydepth.exits.generation.sampling import (
    Dice,
    Draft,
    Sampling,
    judge_drawn,
    judge_greedy,
)
from everydepth.stream import as_stream

VOCABULARY, NEW, ROWS = 5, 3, 6000


def small(seed: int = 0) -> hf.LlamaForCausalLM:
    """Five tokens, two blocks that disagree."""
    torch.manual_seed(seed)
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    model = hf.LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(12)
    return model


@torch.no_grad()
def exact(model: hf.LlamaForCausalLM, sampling: Sampling) -> Tensor:
    """The probability of each of the 125 texts of three tokens after the prompt [1, 2]."""
    texts = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=NEW)))
    ids = torch.cat([torch.tensor([[1, 2]]).expand(len(texts), -1), texts], 1)
    p = sampling.probabilities(model(input_ids=ids).logits[:, 1:-1])
    return p.gather(2, texts[..., None]).prod(1)[:, 0]


def p_value(tokens: list[list[int]], expected: Tensor) -> float:
    """Of a chi-squared test; rare texts are counted together."""
    weights = torch.tensor([VOCABULARY**2, VOCABULARY, 1])
    found = (torch.tensor(tokens) * weights).sum(1).bincount(minlength=VOCABULARY**NEW).double()
    assert not found[expected == 0].any(), "a text that is impossible was drawn"
    common = expected * len(tokens) >= 5
    pairs = [
        torch.cat([x[common], x[~common].sum()[None]]) for x in (found, expected * len(tokens))
    ]
    keep = pairs[1] > 0
    return float(chisquare(pairs[0][keep].numpy(), pairs[1][keep].numpy(), sum_check=False).pvalue)


SETTINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 3},
    {"top_p": 0.8},
    {"temperature": 1.3, "top_k": 4, "top_p": 0.9},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("draft", ["none", "all tokens", "two tokens", "the text"])
def test_texts_come_with_their_exact_probability(draft: str, setting: dict[str, float]) -> None:
    model = small()
    drafting = {
        "none": {},
        "all tokens": {"draft_depth": 1, "draft_always": True},
        "two tokens": {"draft_depth": 1, "draft_always": True, "draft_vocabulary": 2},
        "the text": {"draft_depth": 0, "draft_always": True},
    }[draft]
    said = generate(
        model,
        torch.tensor([[1, 2]]).expand(ROWS, -1),
        max_new_tokens=NEW,
        do_sample=True,
        seed=1,
        eos_token_id=(),
        **setting,
        **drafting,
    )
    # One in a thousand: over twenty cases a right sampler fails at one seed in 50, and 1 is fixed.
    assert p_value(said.tokens, exact(model, Sampling(do_sample=True, **setting))) > 1e-3
    if drafting:
        assert said.stats.acceptance is not None
        assert said.stats.acceptance < 0.95  # the draft is often wrong, so the rule had work to do


def test_the_statistical_test_notices_a_draft_that_is_believed() -> None:
    model = small()
    said = generate(
        model,
        torch.tensor([[1, 2]]).expand(ROWS, -1),
        max_new_tokens=NEW,
        depth=1,
        do_sample=True,
        seed=1,
        eos_token_id=(),
    )
    assert p_value(said.tokens, exact(model, Sampling(do_sample=True))) < 1e-9


def test_the_same_seed_says_the_same_and_another_does_not() -> None:
    model = small()
    prompt = torch.tensor([[1, 2]]).expand(20, -1)

    def said(seed: int, draft_depth: int | None) -> list[list[int]]:
        return generate(
            model, prompt, max_new_tokens=6, do_sample=True, seed=seed, draft_depth=draft_depth
        ).tokens

    for draft_depth in (None, 1):
        assert said(1, draft_depth) == said(1, draft_depth) != said(2, draft_depth)


def test_a_generator_is_used_and_moved_on() -> None:
    model, prompt = small(), torch.tensor([[1, 2]]).expand(20, -1)
    generator = torch.Generator().manual_seed(1)
    first = generate(model, prompt, max_new_tokens=6, do_sample=True, generator=generator).tokens
    second = generate(model, prompt, max_new_tokens=6, do_sample=True, generator=generator).tokens
    assert first == generate(model, prompt, max_new_tokens=6, do_sample=True, seed=1).tokens
    assert first != second


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_probabilities_are_those_of_transformers(setting: dict[str, float]) -> None:
    logits = 3 * torch.randn(4, 50, dtype=torch.float64)
    theirs = logits
    if "temperature" in setting:
        theirs = logits_process.TemperatureLogitsWarper(setting["temperature"])(None, theirs)  # pyright: ignore[reportArgumentType]
    if "top_k" in setting:
        theirs = logits_process.TopKLogitsWarper(int(setting["top_k"]))(None, theirs)  # pyright: ignore[reportArgumentType]
    if "top_p" in setting:
        theirs = logits_process.TopPLogitsWarper(setting["top_p"])(None, theirs)  # pyright: ignore[reportArgumentType]
    ours = Sampling(do_sample=True, **setting).probabilities(logits)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(ours, theirs.softmax(-1), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("setting", [{"temperature": 1e-40}, {"top_p": 1e-50}], ids=str)
def test_settings_that_leave_one_token_leave_the_most_likely(
    setting: dict[str, float], dtype: torch.dtype
) -> None:
    logits = (30 * torch.randn(4, 50, generator=torch.Generator().manual_seed(0))).to(dtype)
    p = Sampling(do_sample=True, **setting).probabilities(logits)  # pyright: ignore[reportArgumentType]
    best = torch.nn.functional.one_hot(logits.argmax(-1), 50)
    torch.testing.assert_close(p, best.to(p), atol=0, rtol=0)


def test_greedy_keeps_the_drafts_before_the_first_wrong_one() -> None:
    wanted = torch.tensor([[3, 1, 4, 0], [2, 2, 2, 1]])
    logits = torch.nn.functional.one_hot(wanted, 5).double()
    drafts = [Draft(torch.tensor(tokens), torch.ones(2)) for tokens in ([3, 2], [0, 2], [4, 2])]
    verdict = judge_greedy(logits, drafts)
    assert verdict.accepted.tolist() == [1, 3]
    assert verdict.following.tolist() == [1, 1]  # instead of the wrong one, and after all of them


def dice(rows: int) -> Dice:
    return Dice.of(rows, torch.Generator().manual_seed(1), torch.device("cpu"))


def test_without_drafts_the_next_token_follows() -> None:
    p = torch.tensor([[[0.0, 99.0, 0.0]], [[0.0, 0.0, 99.0]]], dtype=torch.float64)
    drawn = judge_drawn(p, [], Sampling(do_sample=True), dice(2))
    for verdict in (judge_greedy(p, []), drawn):
        assert verdict.accepted.tolist() == [0, 0]
        assert verdict.following.tolist() == [1, 2]


def test_a_row_draws_the_same_tokens_however_many_are_drafted_at_once() -> None:
    sampling, logits = Sampling(do_sample=True), 3 * torch.randn(2, 6, 5, dtype=torch.float64)
    alone = dice(2)
    wanted = torch.stack([sampling.draw_apart(logits[:, i], alone) for i in range(6)], 1)
    drafts = [Draft(wanted[:, i].clone(), torch.ones(2)) for i in range(5)]
    drafts[3].tokens[1] = (wanted[1, 3] + 1) % 5  # a wrong draft
    verdict = judge_drawn(logits, drafts, sampling, together := dice(2))
    assert verdict.accepted.tolist() == [5, 3]
    assert verdict.following.tolist() == [wanted[0, 5], wanted[1, 3]]
    together.keep([2, 2])  # what a row keeps less, it draws once more
    again = torch.stack([sampling.draw_apart(logits[:, i], together) for i in range(2, 6)], 1)
    assert torch.equal(again, wanted[:, 2:])


def test_looking_ahead_uses_no_random_numbers_up() -> None:
    p = torch.rand(3, 9)
    own = dice(3)
    ahead = [own.copied().draw_all(p) for _ in range(2)]
    assert torch.equal(ahead[0], ahead[1])
    assert torch.equal(ahead[0], own.draw_all(p))
    own.select([2, 0])
    other = dice(3)
    other.draw_all(p)
    assert torch.equal(own.draw_all(p[[2, 0]]), other.draw_all(p)[[2, 0]])


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("draft_depth", "words"), [(0, None), (1, None), (1, 2)])
def test_a_seed_has_one_text_whenever_drafts_are_made(
    rows: int, draft_depth: int, words: int | None
) -> None:
    drafting = {"draft_depth": draft_depth, "draft_vocabulary": words}
    model, said = small(), dict[str, list[list[int]]]()
    prompt = torch.tensor([[1, 2]]).expand(rows, -1)
    told = {"max_new_tokens": 14, "do_sample": True, "seed": 3, "eos_token_id": ()}
    for name, more in {"always": True, "at its own pace": False}.items():
        found = generate(model, prompt, **told, **drafting, draft_always=more)
        said[name] = found.tokens
    assert said["always"] == said["at its own pace"]
    if rows == 1:
        assert said["always"] == generate(model, prompt, **told).tokens


def test_drafting_at_one_of_two_blocks_is_what_these_tests_do() -> None:
    assert as_stream(small()).depth == 2
