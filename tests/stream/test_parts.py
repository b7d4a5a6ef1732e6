"""What the waist says of a block's parts, so that no verb needs to know an architecture."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from tests.zoo import CAUSAL, ENTRIES, Entry
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import everydepth as ed
from everydepth.errors import UnsupportedModelError
from everydepth.stream import Block, Branch
from everydepth.stream.maps import LinearMap

ATTENTIVE = {
    name: entry
    for name, entry in ENTRIES.items()
    if not name.startswith(("ResidualMLP", "CifarResNet", "ResNet"))
}


@pytest.mark.parametrize("entry", ATTENTIVE.values(), ids=ATTENTIVE)
def test_the_heads_of_attention_are_those_of_the_config(entry: Entry) -> None:
    """All models of the zoo have 4; Qwen3 gives its heads 16 dimensions, the others 32 / 4."""
    stream = ed.as_stream(entry.build(), **entry.options)
    size = 16 if entry.name.startswith("Qwen3") else 8
    for block in stream.blocks:
        assert block.heads == 4
        attention = next(b for b in block.branches if b.kind == "attention")
        assert LinearMap(attention.proj).sizes == (32, 4 * size)


@pytest.mark.parametrize("name", sorted(set(ENTRIES) - set(ATTENTIVE)))
def test_a_block_without_attention_has_no_heads(name: str) -> None:
    assert ed.as_stream(ENTRIES[name].build()).blocks[0].heads is None


MAPS = {
    "linear": (lambda: nn.Linear(6, 4), (5, 7, 6)),
    "transposed": (lambda: Conv1D(4, 6), (5, 7, 6)),
    "convolution": (lambda: nn.Conv2d(6, 4, 3, stride=2, padding=1, dilation=1), (5, 6, 9, 8)),
    "pointwise": (lambda: nn.Conv2d(6, 4, 1, bias=False), (5, 6, 3, 3)),
}


@pytest.mark.parametrize("name", MAPS)
def test_a_linear_map_is_one_matrix_on_its_inputs(name: str) -> None:
    build, shape = MAPS[name]
    module, x = build().double(), torch.randn(*shape, dtype=torch.float64)
    found = LinearMap(module)
    y = module(x)
    assert found.output_shape(x) == tuple(y.shape)
    inputs, outputs = found.inputs(x, 5), found.outputs(y, 5)
    out, inside = found.sizes
    assert (outputs.shape[-1], inputs.shape[-1]) == (out, inside)
    matrix = torch.randn(out, inside, dtype=torch.float64)
    bias = torch.randn(out, dtype=torch.float64)
    found.set(matrix, bias)
    expected = inputs @ matrix.T + (bias if found.has_bias else 0)
    torch.testing.assert_close(found.outputs(module(x), 5), expected)


def test_a_convolution_in_groups_is_no_one_matrix() -> None:
    grouped = LinearMap(nn.Conv2d(4, 4, 3, groups=2))
    with pytest.raises(UnsupportedModelError, match=r"has groups=2 .* only one with groups=1"):
        grouped.inputs(torch.zeros(1, 4, 5, 5), 1)


@pytest.mark.parametrize("name", [name for name in CAUSAL if name.endswith("left")])
def test_observing_keeps_the_calls_that_drive_learns(name: str) -> None:
    """So a block runs on its own as it ran inside the model."""
    model, batch = ENTRIES[name].make()
    stream = ed.as_stream(model)
    with torch.no_grad():
        states = stream.observe(batch, calls=True)
        assert len(states.calls) == stream.depth
        for depth, call in enumerate(states.calls):
            output = call(stream.blocks[depth].module, states.h[depth])
            found = output if isinstance(output, Tensor) else output[0]
            assert torch.equal(found, states.h[depth + 1])
    assert stream.observe(batch).calls == ()


def test_the_stream_knows_the_special_tokens_of_a_language_model() -> None:
    model, _ = ENTRIES["Llama-tied-CausalLM-left"].make()
    stream = ed.as_stream(model)
    assert (stream.end_tokens, stream.pad_token, stream.attention) == ((2,), 1, "sdpa")
    model.generation_config.eos_token_id = [2, 5]
    assert stream.end_tokens == (2, 5)
    bare = ed.as_stream(nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2)), **PATHS)
    assert (bare.end_tokens, bare.pad_token, bare.attention) == ((), None, None)


PATHS = {"blocks": "0", "readout": "1"}


def test_a_shared_config_of_encoder_and_decoder_gives_each_its_own_heads() -> None:
    config = hf.BartConfig(
        d_model=16,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_layers=1,
        decoder_layers=1,
        vocab_size=9,
    )
    layer = hf.BartModel(config).decoder.layers[0]
    branch = Branch(
        kind="attention",
        entry=layer.self_attn,
        out=layer.self_attn,
        proj=layer.self_attn.out_proj,
        post=layer.self_attn_layer_norm,
    )
    assert Block(module=layer, branches=(branch,)).heads == 4
