"""Other blocks in the same model: the config says so, and says nothing else anew."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tests.zoo import ENTRIES, SIZES, TEXT
from torch import Tensor, nn

import everydepth as ed
from everydepth.errors import SettingError, UnsupportedModelError
from everydepth.stream import edited, lengthened, shortened
from everydepth.stream.edit import block_copy

T5 = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_heads": 4, "vocab_size": 20}
BART = {
    "d_model": 16,
    "vocab_size": 20,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}


def t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(hf.T5Config(**T5, num_layers=3, num_decoder_layers=3))


def bart() -> nn.Module:
    layers = {"encoder_layers": 3, "decoder_layers": 3}
    return hf.BartForConditionalGeneration(hf.BartConfig(**BART, **layers))


# The field that counts a list, and the field with the same number that counts another.
COUNTS = {
    "T5-decoder": (t5, "decoder.block", "num_decoder_layers", "num_layers"),
    "T5-encoder": (t5, "encoder.block", "num_layers", "num_decoder_layers"),
    "Bart-decoder": (bart, "model.decoder.layers", "decoder_layers", "encoder_layers"),
    "Bart-encoder": (bart, "model.encoder.layers", "encoder_layers", "decoder_layers"),
}


@pytest.mark.parametrize("name", COUNTS)
def test_one_half_of_an_encoder_decoder_is_cut_and_the_other_left_alone(
    name: str, tmp_path: Path
) -> None:
    build, path, counts, other = COUNTS[name]
    model = build()
    small = shortened(model, model.get_submodule(path), 2, share=False)
    assert (getattr(small.config, counts), getattr(small.config, other)) == (2, 3)
    assert (getattr(model.config, counts), getattr(model.config, other)) == (3, 3)
    small.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert len(loaded.get_submodule(path)) == 2


def test_the_private_config_of_an_inner_stack_is_corrected_too() -> None:
    model = t5()
    assert model.decoder.config is not model.config
    small = shortened(model, model.decoder.block, 1, share=True)
    assert small.decoder.config.num_layers == 1
    assert small.encoder.config.num_layers == 3


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (hf.GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=9), "n_layer"),
        (hf.BloomConfig(n_layer=3, hidden_size=8, n_head=2, vocab_size=9), "n_layer"),
        (
            hf.OPTConfig(
                num_hidden_layers=3,
                hidden_size=8,
                ffn_dim=8,
                num_attention_heads=2,
                vocab_size=9,
                word_embed_proj_dim=8,
            ),
            "num_hidden_layers",
        ),
    ],
)
def test_the_count_is_found_whatever_its_name(config: Any, field: str) -> None:
    model = hf.AutoModelForCausalLM.from_config(config)
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 3)
    small = shortened(model, blocks, 2, share=False)
    assert getattr(small.config, field) == small.config.num_hidden_layers == 2


def test_some_blocks_are_kept_with_their_entries_in_the_config() -> None:
    model, batch = ENTRIES["Qwen2-window-CausalLM-left"].make()
    full, sliding = "full_attention", "sliding_attention"
    assert model.config.layer_types == [full, full, sliding, sliding]
    small = edited(model, model.model.layers, [0, 2, 3], share=False)
    assert small.config.layer_types == [full, sliding, sliding]
    assert [layer.self_attn.layer_idx for layer in small.model.layers] == [0, 1, 2]
    for new, old in enumerate((0, 2, 3)):
        ours, theirs = small.model.layers[new], model.model.layers[old]
        assert torch.equal(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight)
    assert small(**batch).logits.shape == model(**batch).logits.shape


def test_a_module_list_of_its_own_class_stays_one() -> None:
    class Stack(nn.Sequential):
        def forward(self, h: Tensor) -> Tensor:
            return super().forward(h).tanh()

    model = nn.Sequential(nn.Linear(2, 2), Stack(nn.Linear(2, 2), nn.Linear(2, 2)))
    small = shortened(model, model[1], 1, share=True)
    assert type(small[1]) is Stack
    assert len(model[1]) == 2
    assert torch.equal(small(torch.ones(1, 2)), model[1][0](model[0](torch.ones(1, 2))).tanh())


def test_an_order_that_makes_no_sense_says_what_is_allowed() -> None:
    model = t5()
    for order in ([], [0, 0], [0, 3]):
        with pytest.raises(SettingError, match=r"from 0 to 2, at least one, each at most once"):
            edited(model, model.decoder.block, order, share=True)
    with pytest.raises(UnsupportedModelError, match="not a module list of T5For"):
        shortened(model, nn.ModuleList(), 1, share=True)


@dataclass
class Every:
    """A config of somebody's own, in which every second block is wide."""

    n_layer: int = 4
    n_head: int = 4
    wide_every: int = 2


@dataclass(frozen=True)
class Frozen:
    n_layer: int = 4


@dataclass
class Two:
    """Two fields with the same number, and a model that asks neither."""

    n_layer: int = 4
    max_layers: int = 4
    depths: list[int] = field(default_factory=list)


class Own(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        every = getattr(config, "wide_every", 1)
        layers = config.n_layer if not isinstance(config, Two) else 4
        self.blocks = nn.ModuleList(
            nn.Linear(2, 4 if place % every else 2) for place in range(layers)
        )


def test_a_config_that_cannot_describe_the_edit_is_refused() -> None:
    model = Own(Every())
    assert shortened(model, model.blocks, 3, share=False).config == Every(n_layer=3)
    with pytest.raises(UnsupportedModelError, match=r"a different block 2 in 'blocks'.*depth"):
        edited(model, model.blocks, [0, 2, 3], share=False)


def test_blocks_changed_after_building_are_not_held_against_the_config() -> None:
    model = Own(Every())
    for place in range(4):
        model.blocks[place] = nn.Linear(2, 7)
    assert len(edited(model, model.blocks, [0, 2, 3], share=False).blocks) == 3


def test_a_config_that_cannot_be_changed_is_refused() -> None:
    model = Own(Frozen())
    with pytest.raises(UnsupportedModelError, match="n_layer of Frozen cannot be set to 2"):
        shortened(model, model.blocks, 2, share=True)


def test_a_count_that_nothing_tells_from_another_is_refused() -> None:
    model = Own(Two())
    words = r"Two has 4 in n_layer and max_layers.*which one counts 'blocks'; write an adapter"
    with pytest.raises(UnsupportedModelError, match=words):
        shortened(model, model.blocks, 2, share=True)


def test_a_stage_is_lengthened_in_the_list_of_its_config() -> None:
    config = hf.ConvNextConfig(depths=[2, 2, 2], hidden_sizes=[4, 8, 16], num_stages=3)
    model = hf.ConvNextForImageClassification(config)
    stage = model.convnext.encoder.stages[1].layers
    big = lengthened(model, stage, 2, block_copy(stage[1]), 2, share=False)
    assert list(big.config.depths) == [2, 3, 2]
    assert list(model.config.depths) == [2, 2, 2]


def test_the_tower_that_is_not_cut_keeps_its_config() -> None:
    sizes = {**TEXT, "num_hidden_layers": 4, "projection_dim": 16}
    vision = {**SIZES, "image_size": 32, "patch_size": 8, "projection_dim": 16}
    model = hf.CLIPModel(hf.CLIPConfig(text_config=sizes, vision_config=vision))
    small = shortened(model, model.text_model.encoder.layers, 1, share=False)
    assert small.config.text_config.num_hidden_layers == 1
    assert small.config.vision_config.num_hidden_layers == 4


class Adding(nn.Module):
    def __init__(self, width: int, branch: nn.Module) -> None:
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(width), branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(self.norm(x))


class OneBranch(nn.Module):
    """All blocks share the branch and have a norm of their own."""

    def __init__(self) -> None:
        super().__init__()
        branch = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.blocks = nn.ModuleList(Adding(8, branch) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_what_kept_and_dropped_blocks_share_is_copied() -> None:
    model = OneBranch()
    small = shortened(model, model.blocks, 2, share=False)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert not own & {parameter.data_ptr() for parameter in small.parameters()}
    assert small.blocks[0].branch is small.blocks[1].branch
    shared = shortened(model, model.blocks, 2, share=True)
    assert {parameter.data_ptr() for parameter in shared.parameters()} < own


class Described(nn.Module):
    """Its config is a dictionary."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        shapes = zip(config["layer_names"], range(config["n_layer"]), strict=True)
        self.blocks = nn.ModuleList(Adding(8, nn.Linear(8, 8)) for _ in shapes)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def test_a_config_that_is_a_dictionary_is_corrected() -> None:
    model = Described({"n_layer": 4, "layer_names": ["a", "b", "c", "d"]}).eval()
    x = torch.randn(2, 8)
    stream = ed.as_stream(model, example=x)
    small = ed.at_depth(stream, 2)
    assert small.config == {"n_layer": 2, "layer_names": ["a", "b"]}
    assert model.config == {"n_layer": 4, "layer_names": ["a", "b", "c", "d"]}
    with torch.no_grad():
        torch.testing.assert_close(small(x), stream.observe(x).logits(2))
        big = ed.insert(stream, after=4)
        assert torch.equal(big(x), model(x))
    assert big.config["n_layer"] == 5


class TwoLists(Described):
    """A list for each stage, counted by one field."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__({**config, "n_layer": 0, "layer_names": []})
        self.config = config
        self.stages = nn.ModuleList(
            nn.ModuleList(Adding(8, nn.Linear(8, 8)) for _ in range(count))
            for count in config["depths"]
        )

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return self.out(x)


def test_stages_in_a_dictionary_are_corrected() -> None:
    model = TwoLists({"depths": [2, 3]}).eval()
    small = ed.at_depth(model, 3, example=torch.randn(2, 8))
    assert (small.config, model.config) == ({"depths": [2, 1]}, {"depths": [2, 3]})
