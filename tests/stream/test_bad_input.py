"""Bad input gets an error of our own type that gives the value, what is allowed, the next step."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import transformers as hf
from tests.zoo import ENTRIES
from torch import nn

import everydepth as ed
from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig
from everydepth.errors import (
    BatchError,
    DepthError,
    LabelError,
    NonFiniteError,
    SettingError,
    UnsupportedModelError,
)
from everydepth.stream.targets import check_labels

VIT, LLAMA = ENTRIES["ViT"], ENTRIES["Llama-tied-CausalLM-left"]


def test_a_model_without_residual_blocks_is_refused_with_a_way_out() -> None:
    with pytest.raises(UnsupportedModelError) as error:
        ed.as_stream(nn.Linear(2, 2))
    assert "Linear has no residual connection" in str(error.value)
    assert "use a network with skips" in str(error.value)


@pytest.mark.parametrize("depth", [-1, 5, 14])
def test_a_depth_outside_the_network_names_the_range(depth: int) -> None:
    model, batch = VIT.make()
    states = ed.as_stream(model).observe(batch)
    expected = f"depth {depth}, but ViTForImageClassification has 4 blocks; use 0 to 4"
    with pytest.raises(DepthError, match=re.escape(expected)):
        states.logits(depth)


def test_a_model_without_blocks_cannot_be_made_or_followed() -> None:
    model, _ = VIT.make()
    with pytest.raises(DepthError, match="use 1 to 4"):
        ed.at_depth(model, 0)
    empty = ResidualMLP(ResidualMLPConfig(num_hidden_layers=0))
    with pytest.raises(DepthError, match="has 0 blocks, so it has no stream"):
        ed.as_stream(empty)


def test_a_batch_without_the_models_input_lists_both() -> None:
    model, _ = LLAMA.make()
    with pytest.raises(
        BatchError,
        match=r"has keys \['pixel_values'\], but LlamaForCausalLM needs"
        r" 'input_ids' or 'inputs_embeds'",
    ):
        ed.as_stream(model).observe({"pixel_values": torch.zeros(1)})


def test_an_empty_batch_is_refused_with_its_shape() -> None:
    model, _ = VIT.make()
    with pytest.raises(BatchError, match=r"'pixel_values' has shape \(0, 3, 32, 32\)"):
        ed.as_stream(model).observe(torch.zeros(0, 3, 32, 32))


@pytest.mark.parametrize(("label", "shown"), [(10, "label 10"), (-3, "label -3")])
def test_a_label_outside_the_head_names_the_range(label: int, shown: str) -> None:
    model, batch = VIT.make()
    labels = torch.tensor([0, 1, label])
    with pytest.raises(
        LabelError,
        match=f"{shown}, but the head of ViTForImageClassification has 10 classes; use 0 to 9",
    ):
        ed.check_stream(model, {**batch, "labels": labels})


def test_ignored_labels_are_allowed_but_not_all_of_them() -> None:
    stream = ed.as_stream(VIT.make()[0])
    check_labels(stream, torch.tensor([-100, 3]))
    with pytest.raises(LabelError, match="all 2 labels are -100"):
        check_labels(stream, torch.tensor([-100, -100]))


@pytest.mark.parametrize("block", [1, 3])
def test_nan_is_traced_to_the_first_block_where_it_appears(block: int) -> None:
    model, batch = VIT.make()
    with torch.no_grad():
        model.vit.layers[block - 1].mlp.fc2.bias[0] = float("nan")
    with pytest.raises(
        NonFiniteError, match=f"after block {block} \\(depth {block} of 4\\), in 3 of 3 rows"
    ) as error:
        ed.as_stream(model).observe(batch, check_finite=True)
    assert error.value.depth == block


def test_nan_in_the_input_is_traced_to_the_embedding() -> None:
    model, batch = VIT.make()
    batch["pixel_values"][1, 0, 0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"after the embedding .* in 1 of 3 rows"):
        ed.as_stream(model).observe(batch).check_finite()


def test_a_cursor_does_not_go_back_or_beyond_the_end() -> None:
    model, batch = VIT.make()
    stream = ed.as_stream(model)
    end = stream.advance(stream.start(batch))
    with pytest.raises(DepthError, match="at depth 4, the last of"):
        stream.step(end)
    with pytest.raises(DepthError, match="at depth 4 and cannot go back to 1"):
        stream.advance(end, to=1)


def test_a_cache_for_a_model_without_one_is_refused() -> None:
    model, batch = VIT.make()
    with pytest.raises(UnsupportedModelError, match="has no key/value cache"):
        ed.as_stream(model).start(batch, cache=object())
    with pytest.raises(UnsupportedModelError, match="only causal language models have one"):
        ed.as_stream(model).new_cache()


def test_layer_drop_is_reported_not_misread() -> None:
    torch.manual_seed(0)
    model, batch = ENTRIES["OPT-prenorm-CausalLM-left"].make()
    model.train()
    model.model.decoder.layerdrop = 1.0
    with pytest.raises(UnsupportedModelError, match=r"ran 0 of its 4 blocks.*layer drop"):
        ed.as_stream(model).observe(batch)
    with pytest.raises(UnsupportedModelError, match=r"called 0 of its 4 blocks.*layer drop"):
        ed.as_stream(model).start(batch)


def test_clip_asks_which_tower() -> None:
    model, _ = ENTRIES["CLIPModel-text"].make()
    with pytest.raises(SettingError, match="tower=None, but CLIPModel has vision and text"):
        ed.as_stream(model)


def test_a_chunked_feed_forward_is_refused_with_the_setting_to_change() -> None:
    config = hf.BertConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=1,
        intermediate_size=32,
        vocab_size=20,
        chunk_size_feed_forward=2,
    )
    with pytest.raises(UnsupportedModelError, match=r"chunk_size_feed_forward is 2.*forward=0"):
        ed.as_stream(hf.BertForMaskedLM(config))


def test_a_model_that_never_runs_says_what_the_likeliest_batch_met() -> None:
    """Of several batches that were tried: not of the last, which has another image size."""
    config = hf.ViTConfig(
        image_size=8, patch_size=4, num_channels=1, num_labels=3, hidden_size=8,
        num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
    )  # fmt: skip
    model = hf.ViTForImageClassification(config)
    model.classifier = nn.Linear(9, 3)  # of another width
    said = r"does not run .*shapes cannot be multiplied .*; if it runs on yours, pass one: "
    with pytest.raises(UnsupportedModelError, match=said):
        ed.as_stream(model)


@pytest.mark.parametrize("cache", [True, {}, "", []])
def test_what_is_no_cache_is_refused(cache: object) -> None:
    model, batch = LLAMA.make()
    with pytest.raises(SettingError, match=r"cache is \w+; pass `new_cache\(\)`"):
        ed.as_stream(model).start(batch, cache=cache)


def test_labels_without_values_are_refused() -> None:
    model, batch = LLAMA.make()
    labels = batch["input_ids"].to("meta")
    with pytest.raises(LabelError, match="labels are on the 'meta' device"):
        ed.EveryDepth(model)(**{**batch, "labels": labels})


@pytest.mark.parametrize("name", ["logits", "calls", "check_finite"])
def test_flags_of_an_observation_are_flags(name: str) -> None:
    model, batch = VIT.make()
    with pytest.raises(SettingError, match=rf"(?s)observe\({name}=.*use True or False"):
        ed.as_stream(model).observe(batch, **{name: np.zeros((2, 3))})  # type: ignore[arg-type]
