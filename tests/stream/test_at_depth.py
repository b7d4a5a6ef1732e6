"""A plain, shallower model of the same class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zoo import CAUSAL, ENTRIES, MODELS, Entry
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

import everydepth as ed
from everydepth.errors import DepthError, SettingError, UnsupportedModelError


@pytest.mark.parametrize("entry", MODELS.values(), ids=MODELS)
def test_a_cut_model_survives_saving_and_loading_by_its_own_class(
    entry: Entry, tmp_path: Path
) -> None:
    """`from_pretrained` builds from the corrected config: a wrong one would not fit the weights."""
    model, batch = entry.make()
    stream = ed.as_stream(model, **entry.options)
    small = ed.at_depth(model, 2, **entry.options)
    assert type(small) is type(model)
    small.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    again = ed.as_stream(loaded.eval(), **entry.options)
    assert again.depth == 2
    with torch.no_grad():
        expected = stream.observe(batch).logits(2)
        found = again.prediction(again.call(again.arguments(batch, None)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def storage(model: nn.Module) -> set[int]:
    return {t.data_ptr() for t in (*model.parameters(), *model.buffers()) if t.numel()}


def test_weights_are_copied_unless_sharing_is_asked_for() -> None:
    model, _ = ENTRIES["Llama-untied-CausalLM-left"].make()
    copied, shared = ed.at_depth(model, 2), ed.at_depth(model, 2, share=True)
    assert not storage(copied) & storage(model)
    assert storage(shared) < storage(model)


def test_the_original_is_untouched() -> None:
    model, batch = ENTRIES["Qwen2-window-CausalLM-left"].make()
    with torch.no_grad():
        before = model(**batch).logits
        ed.at_depth(model, 1)
        assert torch.equal(model(**batch).logits, before)
    assert model.config.num_hidden_layers == 4
    assert len(model.config.layer_types) == 4


def test_per_layer_lists_of_the_config_are_cut() -> None:
    model, _ = ENTRIES["Qwen2-window-CausalLM-left"].make()
    small = ed.at_depth(model, 3)
    assert small.config.num_hidden_layers == 3
    assert small.config.layer_types == model.config.layer_types[:3]
    assert small.model.config is small.config


def test_tied_weights_stay_tied() -> None:
    model, _ = ENTRIES["Llama-tied-CausalLM-left"].make()
    small = ed.at_depth(model, 2)
    assert small.lm_head.weight is small.model.embed_tokens.weight


@pytest.mark.parametrize("name", [name for name in CAUSAL if name.endswith("left")])
def test_a_cut_language_model_generates(name: str) -> None:
    model, batch = ENTRIES[name].make()
    out = ed.at_depth(model, 2).generate(**batch, max_new_tokens=3, do_sample=False, pad_token_id=1)
    assert out.shape == (3, 10)


class Weighted(nn.Module):
    """Two ways to count blocks other than by going through their list."""

    def __init__(self, counts: str) -> None:
        super().__init__()
        self.counts, self.number = counts, 4
        self.inp, self.out = nn.Linear(8, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Branched() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for place in range(self.number if self.counts == "number" else len(self.blocks)):
            weight = (place + 1) / len(self.blocks) if self.counts == "share" else 1.0
            x = self.blocks[place](x, weight)
        return self.out(x)


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, weight: float) -> Tensor:
        return x + weight * self.down(torch.tanh(self.up(self.norm(x))))


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ("number", r"with blocks \[1, 2\] does not run \(IndexError.*needs all 4, whatever"),
        ("share", "with 2 of its 4 blocks does not predict what it does at depth 2"),
    ],
)
def test_a_model_that_counts_its_blocks_in_its_own_way_is_not_cut(counts: str, said: str) -> None:
    torch.manual_seed(0)
    model = Weighted(counts).train()
    for give in ({"depth": 2}, {"keep": [1, 2]}):
        with pytest.raises(UnsupportedModelError, match=said):
            ed.at_depth(model, **give)
    assert model.training
    assert "forward" not in vars(model)
    small = ed.at_depth(Weighted("list").train(), keep=[1, 3])
    assert len(small.blocks) == 2
    assert small.training


def test_blocks_that_are_needed_are_named_in_the_error() -> None:
    said = r"with blocks \[1, 3\] does not run .* instead \(predict and observe"
    with pytest.raises(UnsupportedModelError, match=said):
        ed.at_depth(Weighted("number").eval(), keep=[1, 3])


class Placed(nn.Module):
    """Does something between two blocks that it knows by their places."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(8, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Branched() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for place, block in enumerate(self.blocks):
            x = block(x, 1.0 if place < 2 else 0.5)
        return self.out(x)


def test_kept_blocks_that_would_do_something_else_at_their_new_places_are_refused() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(4, 8), Placed().eval()
    said = r"with blocks \[1, 3\] does not predict what these do one after another"
    with pytest.raises(UnsupportedModelError, match=said):
        ed.at_depth(model, keep=[1, 3])
    with torch.no_grad():
        h = model.inp(x)
        for place, weight in ((0, 1.0), (1, 1.0), (3, 0.5)):
            h = model.blocks[place](h, weight)
        torch.testing.assert_close(ed.at_depth(model, keep=[1, 2, 4])(x), model.out(h))


def t5() -> T5ForConditionalGeneration:
    """Its first block computes a bias that it hands on to all others."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 4, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, vocab_size=40)).eval()


def test_kept_blocks_hand_on_what_later_ones_are_given() -> None:
    model, ids = t5(), torch.randint(3, 40, (2, 5))
    batch = {"input_ids": ids, "decoder_input_ids": ids[:, :3]}
    small = ed.at_depth(model, keep=[1, 3, 4])
    model.decoder.block = nn.ModuleList(model.decoder.block[place] for place in (0, 2, 3))
    assert torch.equal(small(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("wrong", [0, 9, -1])
@pytest.mark.parametrize("name", ["ViT", "CifarResNet-post-projection"])
def test_a_stream_cuts_its_model_only_at_depths_it_has(name: str, wrong: int) -> None:
    stream = ed.as_stream(ENTRIES[name].make()[0])
    with pytest.raises(DepthError, match=r"use 1 to \d"):
        stream.truncated(wrong, share=True)
    with pytest.raises(DepthError, match=r"use 1 to \d"):
        stream.kept([wrong], share=True)


@pytest.mark.parametrize("wrong", [None, 1, torch.zeros(0)])
def test_a_stream_shares_its_parameters_or_not(wrong: Any) -> None:
    with pytest.raises(SettingError, match=r"truncated\(share=.*use True or False"):
        ed.as_stream(ENTRIES["ViT"].make()[0]).truncated(1, share=wrong)


@pytest.mark.parametrize("wrong", [None, 2, "two", [None]])
def test_a_stream_keeps_only_blocks_with_numbers(wrong: Any) -> None:
    with pytest.raises(SettingError, match=r"kept\(numbers=.*use"):
        ed.as_stream(ENTRIES["ViT"].make()[0]).kept(wrong, share=True)
