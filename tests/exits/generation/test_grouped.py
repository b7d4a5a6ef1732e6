"""Heads that share keys read them where they are; the result is transformers' own, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import everydepth as ed
from everydepth.exits.generation.grouped import attend, shared_keys


def attention(groups: int | None = 3) -> nn.Module:
    """A module that says, as transformers' do, how many heads share keys and values."""
    module = nn.Module()
    if groups is not None:
        module.num_key_value_groups = groups  # type: ignore[assignment]
    return module


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often keys or values were copied for each head."""
    counted: list[int] = []
    repeat = sdpa_attention.repeat_kv

    def counting(states: Tensor, times: int) -> Tensor:
        counted.append(times)
        return repeat(states, times)

    monkeypatch.setattr(sdpa_attention, "repeat_kv", counting)
    return counted


def qkv(tokens: int, heads: int = 6, shared: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    return (
        torch.randn(4, heads, tokens, 16, generator=made),
        torch.randn(4, shared, 40, 16, generator=made),
        torch.randn(4, shared, 40, 16, generator=made),
    )


def masked(tokens: int) -> Tensor:
    """Rows of different lengths, of which the first token is always seen."""
    lengths = torch.tensor([40, 31, 1, 17])
    return (torch.arange(40) < lengths[:, None])[:, None, None].expand(4, 1, tokens, 40)


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("tokens", [1, 4, 40])
@pytest.mark.parametrize("additive", [False, True])
def test_the_result_is_that_of_copies_bit_for_bit(
    tokens: int, additive: bool, scaling: float | None, copies: list[int]
) -> None:
    mask = masked(tokens)
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    states = qkv(tokens)
    found, _ = attend(attention(), *states, mask, scaling=scaling)
    assert not copies
    wanted, _ = sdpa_attention_forward(attention(), *states, mask, scaling=scaling)
    assert copies == [3, 3]
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride()


@pytest.mark.parametrize(
    "other", ["no mask", "as many keys as heads", "groups the module does not know", "a bias"]
)
def test_everything_else_is_left_to_transformers(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    module, mask, states, more = attention(), masked(1), qkv(1), dict[str, Any]()
    if other == "no mask":
        mask = None
    elif other == "as many keys as heads":
        module, states = attention(None), qkv(1, heads=2)
    elif other == "groups the module does not know":
        module = attention(None)
    else:
        more = {"position_bias": torch.zeros(1, 6, 1, 40)}
    monkeypatch.setattr(
        "transformers.integrations.sdpa_attention.sdpa_attention_forward",
        lambda *given, **options: asked.append(options) or (given[1], None),
    )
    attend(module, *states, mask, **more)
    assert asked == [{"dropout": 0.0, "scaling": None, **more}]


def test_transformers_has_its_function_back_afterwards_and_after_an_error() -> None:
    with shared_keys():
        with shared_keys():
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attend
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attend
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    with pytest.raises(KeyError), shared_keys():
        raise KeyError
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_a_function_of_the_users_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*_: Any, **__: Any) -> tuple[Tensor, None]:
        raise AssertionError

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", own)
    with shared_keys():
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own


def test_prompts_of_different_lengths_are_decoded_without_copies(copies: list[int]) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=32,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(1, 50, (3, 9))
    mask = torch.tensor([[0] * 4 + [1] * 5, [1] * 9, [0] * 2 + [1] * 7])
    wanted = model.generate(
        ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    assert copies
    copies.clear()
    found = ed.generate(model, ids, attention_mask=mask, max_new_tokens=8)
    assert not copies
    assert torch.equal(found.sequences[:, 9:], wanted[:, 9:])
