"""A deeper model of the same class that computes the same function."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tests.zoo import CAUSAL, ENTRIES, MODELS, Entry
from tests.zoo.stock import stock
from torch import Tensor, nn

import everydepth as ed
from everydepth.errors import DepthError, ExportError, SettingError, UnsupportedModelError
from everydepth.stream import Block, Branch, sites
from everydepth.stream.insert import refusal

POST_NORM = ("Bert", "Roberta", "DistilBert", "Detr", "OPT-postnorm")
AUXILIARY = "Detr-auxiliary"
GROWABLE = {
    name: entry for name, entry in MODELS.items() if "skips0" not in name and name != AUXILIARY
}
STOCK = {name: entry for name, entry in GROWABLE.items() if not name.startswith(POST_NORM)}
REFUSED = {name: entry for name, entry in ENTRIES.items() if "skips0" in name}


def prediction(model: nn.Module, batch: dict[str, Tensor], entry: Entry) -> Tensor:
    stream = ed.as_stream(model, **entry.options)
    with torch.no_grad():
        return stream.prediction(stream.call(stream.arguments(batch, None)))


@pytest.mark.parametrize("entry", GROWABLE.values(), ids=GROWABLE)
def test_an_inserted_block_changes_no_bit_at_any_site(entry: Entry) -> None:
    model, batch = entry.make()
    stream = ed.as_stream(model, **entry.options)
    before = prediction(model, batch, entry)
    assert sites(stream) == tuple(range(stream.depth + 1))
    for after in sites(stream):
        big = ed.insert(model, after, share=True, **entry.options)
        assert type(big) is type(model)
        assert ed.as_stream(big, **entry.options).depth == stream.depth + 1
        assert torch.equal(prediction(big, batch, entry), before)
    assert torch.equal(prediction(model, batch, entry), before)


@pytest.mark.parametrize("entry", STOCK.values(), ids=STOCK)
def test_a_grown_model_survives_saving_and_loading_by_its_own_class(
    entry: Entry, tmp_path: Path
) -> None:
    model, batch = entry.make()
    last = ed.as_stream(model, **entry.options).depth
    big = ed.insert(ed.insert(model, 1, **entry.options), last + 1, **entry.options)
    big.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = prediction(loaded.eval(), batch, entry)
    assert torch.equal(found, prediction(model, batch, entry))
    layers = [m.layer_idx for m in big.modules() if isinstance(vars(m).get("layer_idx"), int)]
    again = [m.layer_idx for m in loaded.modules() if isinstance(vars(m).get("layer_idx"), int)]
    assert layers == again
    rates = [getattr(m, "drop_prob", None) for m in big.modules()]
    assert rates == [getattr(m, "drop_prob", None) for m in loaded.modules()]


@pytest.mark.parametrize("entry", REFUSED.values(), ids=REFUSED)
def test_where_a_silent_block_is_not_the_identity_insertion_is_refused(entry: Entry) -> None:
    model, _ = entry.make()
    assert sites(model) == ()
    with pytest.raises(UnsupportedModelError, match="is not the identity"):
        ed.insert(model, 1)


def test_a_last_map_that_is_only_known_to_be_somewhere_inside_is_refused() -> None:
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    branch = Branch(kind="mixer", entry=whole, out=whole, proj=whole)
    said = refusal(Block(module=whole, branches=(branch,)))
    assert said == (
        "the last map of its mixer branch is somewhere inside Sequential, so it is unknown which "
        "weights to zero"
    )


def test_a_norm_between_the_blocks_allows_no_insertion() -> None:
    model, _ = ENTRIES[AUXILIARY].make()
    with pytest.raises(UnsupportedModelError, match=r"auxiliary_loss.* would change the function"):
        ed.insert(model, 1)


def test_a_new_block_of_a_post_norm_network_has_no_norm_after_its_sums(tmp_path: Path) -> None:
    model, batch = ENTRIES["Bert-SequenceClassification"].make()
    big = ed.insert(model, 2).eval()
    kinds = [type(layer.output.LayerNorm) for layer in big.bert.encoder.layer]
    assert kinds.count(nn.Identity) == 1
    assert kinds[2] is nn.Identity
    deeper = ed.insert(big, 3, like=3).eval()
    with torch.no_grad():
        assert torch.equal(deeper(**batch).logits, model(**batch).logits)
        cut = ed.at_depth(big, 3)
        assert torch.equal(cut(**batch).logits, ed.as_stream(model).observe(batch).logits(2))
    with pytest.raises(ExportError, match=r"nothing was written: BertFor.* a different model"):
        ed.export(big, tmp_path / "out")
    assert not (tmp_path / "out").exists()


CONTRACT = [
    "Llama-tied-CausalLM-left",
    "CifarResNet-post-pad",
    "Beit-mean-pooling",
    "GPT2-CausalLM-left",
    "Bert-MaskedLM",
    "OPT-postnorm-CausalLM-left",
]


@pytest.mark.parametrize("name", CONTRACT)
def test_a_grown_model_keeps_the_contract(name: str) -> None:
    model, batch = ENTRIES[name].make()
    assert ed.check_stream(ed.insert(model, 2), batch).ok


@pytest.mark.parametrize("name", [n for n in CAUSAL if n in GROWABLE and n.endswith("left")])
def test_a_grown_language_model_generates_the_same_text(name: str) -> None:
    model, batch = ENTRIES[name].make()
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 1}
    big = ed.insert(model, 2)
    assert torch.equal(big.generate(**batch, **settings), model.generate(**batch, **settings))


def test_per_layer_lists_of_the_config_grow_by_the_kind_of_the_new_block() -> None:
    model, _ = ENTRIES["Qwen2-window-CausalLM-left"].make()
    full, sliding = "full_attention", "sliding_attention"
    assert model.config.layer_types == [full, full, sliding, sliding]
    assert ed.insert(model, 2).config.layer_types == [full, full, full, sliding, sliding]
    assert ed.insert(model, 2, like=3).config.layer_types == [full, full, sliding, sliding, sliding]
    assert model.config.num_hidden_layers == 4


def test_a_new_block_reads_the_config_of_the_grown_model() -> None:
    model, _ = ENTRIES["Llama-untied-CausalLM-left"].make()
    big = ed.insert(model, 2)
    assert big.model.layers[2].self_attn.config is big.config
    assert big.config is not model.config


def test_a_stage_of_one_shape_changing_block_gets_a_plain_one() -> None:
    model, _ = ENTRIES["ResNetForImageClassification-basic"].make()
    big = ed.insert(model, 5)
    assert big.config.depths == [2, 2, 2]
    assert isinstance(big.resnet.encoder.stages[2].layers[1].shortcut, nn.Identity)
    with pytest.raises(DepthError, match=r"there is no block of this shape to copy.*init='fresh'"):
        ed.insert(model, 5, init="copy")


def test_a_block_between_stages_ends_the_earlier_one() -> None:
    model, _ = ENTRIES["CifarResNet-post-projection"].make()
    assert model.config.blocks_per_stage == [2, 2, 2]
    assert ed.insert(model, 2).config.blocks_per_stage == [3, 2, 2]
    assert ed.insert(model, 3).config.blocks_per_stage == [2, 3, 2]
    assert ed.insert(model, 0).config.blocks_per_stage == [3, 2, 2]


def test_a_copy_has_the_weights_of_its_neighbor_but_for_the_last_projection() -> None:
    model, _ = ENTRIES["Llama-untied-CausalLM-left"].make()
    big = ed.insert(model, 2, init="copy")
    old, new = model.model.layers[1].state_dict(), big.model.layers[2].state_dict()
    for name in old:
        if name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            assert not new[name].any()
        else:
            assert torch.equal(new[name], old[name])


def test_a_fresh_block_is_drawn_as_the_model_draws_its_own() -> None:
    model, _ = ENTRIES["Llama-untied-CausalLM-left"].make()
    new = ed.insert(model, 2).model.layers[2]
    old = model.model.layers[1]
    assert not torch.equal(new.mlp.up_proj.weight, old.mlp.up_proj.weight)
    assert new.mlp.up_proj.weight.std().item() == pytest.approx(
        model.config.initializer_range, rel=0.1
    )
    resnet, _ = ENTRIES["CifarResNet-post-pad"].make()
    norm = ed.insert(resnet, 1).layer1[1].bn1
    assert not norm.running_mean.any()
    assert (norm.running_var == 1).all()


def test_tensors_are_copied_unless_sharing_is_asked_for() -> None:
    model, _ = ENTRIES["Llama-tied-CausalLM-left"].make()
    own = {p.data_ptr() for p in model.parameters()}
    copied, shared = ed.insert(model, 2), ed.insert(model, 2, share=True)
    assert not own & {p.data_ptr() for p in copied.parameters()}
    assert own < {p.data_ptr() for p in shared.parameters()}
    assert copied.lm_head.weight is copied.model.embed_tokens.weight


@pytest.mark.parametrize("training", [False, True])
def test_modes_stay_as_they_were(training: bool) -> None:
    for name in ("Llama-tied-CausalLM-left", "CifarResNet-post-pad"):
        model, _ = ENTRIES[name].make()
        assert {m.training for m in ed.insert(model.train(training), 1).modules()} == {training}


def test_attention_scaled_by_the_number_of_the_block_allows_the_last_site_only() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=8, vocab_size=9, scale_attn_by_inverse_layer_idx=True
    )
    model = GPT2LMHeadModel(config)
    with pytest.raises(UnsupportedModelError, match="insert after=2"):
        ed.insert(model, 1)
    assert ed.insert(model, 2).config.n_layer == 3


def test_bad_arguments_say_what_is_allowed() -> None:
    model, _ = ENTRIES["Llama-untied-CausalLM-left"].make()
    with pytest.raises(DepthError, match="depth 5, but LlamaForCausalLM has 4 blocks; use 0 to 4"):
        ed.insert(model, 5)
    with pytest.raises(DepthError, match=r"like=9, but .* like one of \[1, 2, 3, 4\]"):
        ed.insert(model, 2, like=9)
    with pytest.raises(SettingError, match="init='zero'; use 'fresh' or 'copy'"):
        ed.insert(model, 2, init="zero")


def test_a_model_without_declared_branches_is_refused() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 2))
    with pytest.raises(UnsupportedModelError, match="its branches are unknown"):
        ed.insert(model, 1, blocks="0", readout="1")


@pytest.mark.parametrize(
    "name", ["Qwen3-window-CausalLM-left", "CifarResNet-pre-pad", "Bert-MaskedLM"]
)
def test_in_training_mode_a_new_block_is_silent_and_gets_a_gradient(name: str) -> None:
    model, batch = ENTRIES[name].make()
    big = ed.insert(model, 2).train()
    stream = ed.as_stream(big)
    states = stream.observe(batch)
    assert torch.equal(states.h[2], states.h[3])
    states.logits(stream.depth).square().mean().backward()
    projections = [b.mixing or b.proj for b in stream.blocks[2].branches]
    found = [p.grad for m in projections for p in m.parameters()]
    assert all(bool(g.any()) for g in itertools.chain(found) if g is not None)


@pytest.mark.parametrize("name", ["causal:MixtralForCausalLM", "causal:GptOssForCausalLM"])
def test_experts_in_one_module_are_silent_by_their_last_matrix_and_can_learn(name: str) -> None:
    """All of their matrices at zero would be silent for good: no gradient would reach any."""
    model, batch = next(entry for entry in stock() if entry.name == name).make()
    big = ed.insert(model, 1).eval()
    with torch.no_grad():
        assert torch.equal(big(**batch).logits, model(**batch).logits)
    branch = ed.as_stream(big).blocks[1].branches[-1]
    assert all(not bool(p.any()) for p in branch.zeroed())
    others = set(branch.proj.parameters(recurse=False)) - set(branch.zeroed())
    assert any(p.ndim > 2 and bool(p.any()) for p in others)
    big(**batch).logits.square().mean().backward()
    assert all(bool(p.grad.any()) for p in branch.zeroed() if p.grad is not None)
    assert any(p.grad is not None for p in branch.zeroed())
