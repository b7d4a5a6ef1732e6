"""Embeddings of bare encoders: the pooled output of the model cut to each depth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import everydepth as ed
from everydepth.errors import SettingError

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 60,
}


def encoder(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "bert":
        return hf.BertModel(hf.BertConfig(**SIZES), add_pooling_layer=False).eval()
    return hf.LlamaModel(hf.LlamaConfig(**SIZES, num_key_value_heads=1)).eval()


def batch(side: str = "right") -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (4, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, slice(4, None) if side == "right" else slice(0, 3)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def pooled(tokens: Tensor, mask: Tensor, how: str) -> Tensor:
    rows = [row[real.bool()] for row, real in zip(tokens, mask, strict=True)]
    pick = {"mean": lambda r: r.mean(0), "first": lambda r: r[0], "last": lambda r: r[-1]}[how]
    return torch.stack([pick(row) for row in rows])


@pytest.mark.parametrize("how", ["mean", "first", "last"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_every_depth_gives_the_pooled_output_of_the_cut_encoder(
    name: str, side: str, how: str
) -> None:
    model, given = encoder(name), batch(side)
    stream = ed.as_stream(model, task="embedding", token=how)
    with torch.no_grad():
        states = stream.observe(given)
        for depth in (1, 2, 3):
            cut = ed.at_depth(model, depth, task="embedding", token=how)
            tokens = cut(**given).last_hidden_state
            expected = pooled(tokens, given["attention_mask"], how)
            torch.testing.assert_close(states.logits(depth), expected, rtol=1e-5, atol=1e-6)
        driven = stream.advance(stream.start(given))
        torch.testing.assert_close(stream.logits(driven), states.logits(3), rtol=1e-5, atol=1e-6)


def test_trace_and_profile_measure_embeddings() -> None:
    model, given = encoder("bert"), batch()
    found = ed.trace(model, given, ["embedding_cos"], task="embedding", progress=False)
    assert found["embedding_cos"].shape == (4, 4)
    np.testing.assert_allclose(np.diag(found["embedding_cos"]), 1, atol=1e-5)
    profile = ed.profile(model, given, task="embedding", repeats=1, progress=False)
    assert (profile.metric, profile.at(3).quality) == ("error", 0)
    assert profile.at(1).quality > 0


def test_what_cannot_be_pooled_is_refused() -> None:
    with pytest.raises(SettingError, match="pooled by mean, first, last"):
        ed.as_stream(encoder("bert"), task="embedding", token="all")
