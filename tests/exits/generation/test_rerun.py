"""Decoding of models whose cache is not keys and values by token."""

from __future__ import annotations

import math

import pytest
import torch
import transformers as hf
from tests.zoo.stock import stock

import everydepth as ed
from everydepth.errors import UnsupportedModelError
from everydepth.exits.generation.rerun import Rerun, has_slots, tape_for

KNOWN = {entry.name: entry for entry in stock()}
SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "vocab_size": 50, "eos_token_id": None}


def jamba() -> torch.nn.Module:
    """Blocks with a recurrent state, and blocks with keys and values."""
    torch.manual_seed(0)
    more = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
    kinds = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}
    mamba = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
    return hf.JambaForCausalLM(hf.JambaConfig(**SMALL, **more, **kinds, **mamba)).eval()


def by_hand(model: torch.nn.Module, ids: torch.Tensor, count: int) -> list[list[int]]:
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat(
                [ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1
            )
    return ids[:, -count:].tolist()


@pytest.mark.parametrize("depth", [1, 3])
def test_a_model_with_a_recurrent_state_decodes_as_its_cut_model_does(depth: int) -> None:
    model = jamba()
    ids = torch.randint(0, 50, (2, 5), generator=torch.Generator().manual_seed(1))
    found = ed.generate(model, ids, max_new_tokens=4, depth=depth)
    cut = ed.at_depth(model, depth)
    assert [list(row) for row in found.tokens] == by_hand(cut, ids, 4)


def test_rows_of_different_lengths_decode_as_they_do_alone() -> None:
    # Position tables and recurrences restart for each row: what is padding must not be seen.
    model, _ = KNOWN["causal:BloomForCausalLM"].make()
    rows = [[7, 8, 9, 10, 11], [12, 13, 14]]
    together = ed.generate(model, rows, max_new_tokens=4, eos_token_id=())
    for row, tokens in zip(rows, together.tokens, strict=True):
        alone = ed.generate(model, row, max_new_tokens=4, eos_token_id=())
        assert list(tokens) == list(alone.tokens[0])


def test_exits_without_slots_choose_what_full_depth_chooses_if_nothing_is_trusted() -> None:
    model = jamba()
    ids = torch.randint(0, 50, (2, 5), generator=torch.Generator().manual_seed(1))
    never = ed.exits.Confidence(threshold=math.inf)
    found = ed.generate(model, ids, max_new_tokens=3, policy=never)
    assert [list(row) for row in found.tokens] == by_hand(model, ids, 3)
    assert found.stats.agreement == 1.0


def test_drafts_without_slots_are_refused_with_what_is_missing() -> None:
    with pytest.raises(UnsupportedModelError, match="drafts need a cache of keys and values"):
        ed.generate(jamba(), [1, 2, 3], max_new_tokens=3, draft_depth=1)


def test_keys_and_values_by_token_are_recognized_by_what_they_give() -> None:
    model, batch = KNOWN["causal:GPTJForCausalLM"].make()
    stream = ed.as_stream(model)
    ids = batch["input_ids"]
    assert has_slots(stream, ids)
    assert not isinstance(tape_for(stream, ids, ids >= 0, top=3, room=12), Rerun)
    other = ed.as_stream(jamba())
    assert isinstance(tape_for(other, ids % 50, ids >= 0, top=3, room=12), Rerun)


def test_one_block_alone_has_slots_too() -> None:
    torch.manual_seed(0)
    shape = SMALL | {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    stream = ed.as_stream(hf.LlamaForCausalLM(hf.LlamaConfig(**shape)).eval())
    assert has_slots(stream, torch.tensor([[3, 1, 2]]))
