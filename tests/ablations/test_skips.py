"""Scaled skips: identity, reference blocks of every family, restoration, gradients, errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.zoo import CAUSAL, ENTRIES, MODELS
from torch import Tensor, nn

import everydepth as ed
from everydepth.ablations import scaled_skip
from everydepth.errors import DepthError, SettingError, UnsupportedModelError
from everydepth.stream import Cursor, as_stream

# One tiny model per way of computing a block; variants that share the block are left to the
# identity test, which runs on all of them.
Scales = tuple[float, float]


def hooks(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return sum(len(getattr(m, kind)) for m in model.modules() for kind in kinds)


# -- blocks written by hand, with a factor on each skip -------------------------------------------


def llama(m: Any, x: Tensor, call: dict[str, Any], c: Scales) -> Tensor:
    x = c[0] * x + m.self_attn(hidden_states=m.input_layernorm(x), **call)[0]
    return c[1] * x + m.mlp(m.post_attention_layernorm(x))


def gpt2(m: Any, x: Tensor, call: dict[str, Any], c: Scales) -> Tensor:
    call = {k: v for k, v in call.items() if "encoder" not in k}
    x = c[0] * x + m.attn(m.ln_1(x), **call)[0]
    return c[1] * x + m.mlp(m.ln_2(x))


def neox(m: Any, x: Tensor, call: dict[str, Any], c: Scales) -> Tensor:
    attention = m.attention(m.input_layernorm(x), **call)[0]
    if m.use_parallel_residual:
        return c[0] * x + attention + m.mlp(m.post_attention_layernorm(x))
    x = c[0] * x + attention
    return c[1] * x + m.mlp(m.post_attention_layernorm(x))


def opt(m: Any, x: Tensor, call: dict[str, Any], c: Scales) -> Tensor:
    call = {k: v for k, v in call.items() if k != "use_cache"}
    first = m.self_attn_layer_norm if m.do_layer_norm_before else nn.Identity()
    second = m.final_layer_norm if m.do_layer_norm_before else nn.Identity()
    x = c[0] * x + m.self_attn(hidden_states=first(x), **call)[0]
    x = x if m.do_layer_norm_before else m.self_attn_layer_norm(x)
    x = c[1] * x + m.fc2(m.activation_fn(m.fc1(second(x))))
    return x if m.do_layer_norm_before else m.final_layer_norm(x)


def vit(m: Any, x: Tensor, call: dict[str, Any], c: Scales) -> Tensor:
    x = c[0] * x + m.attention(m.layernorm_before(x), **call)[0]
    return c[1] * x + m.mlp(m.layernorm_after(x))


def beit(m: Any, x: Tensor, call: dict[str, Any], c: Scales) -> Tensor:
    mask = call.get("attention_mask")
    if m.relative_position_bias is not None:
        window = tuple(side // m.patch_size for side in call["resolution"])
        mask = m.relative_position_bias(window, False, dim_size=x.shape[1])
    attention = m.attention(m.layernorm_before(x), attention_mask=mask)[0]
    x = c[0] * x + m.lambda_1 * attention
    return c[1] * x + m.lambda_2 * m.mlp(m.layernorm_after(x))


def bert(m: Any, x: Tensor, call: dict[str, Any], c: Scales) -> Tensor:
    inner = m.attention.self(x, attention_mask=call.get("attention_mask"))[0]
    x = m.attention.output.LayerNorm(c[0] * x + m.attention.output.dense(inner))
    return m.output.LayerNorm(c[1] * x + m.output.dense(m.intermediate(x)))


def distilbert(m: Any, x: Tensor, call: dict[str, Any], c: Scales) -> Tensor:
    attention = m.attention(x, attention_mask=call.get("attention_mask"))[0]
    x = m.sa_layer_norm(c[0] * x + attention)
    return m.output_layer_norm(c[1] * x + m.ffn(x))


def clip(m: Any, x: Tensor, call: dict[str, Any], c: Scales) -> Tensor:
    x = c[0] * x + m.self_attn(hidden_states=m.layer_norm1(x), **call)[0]
    return c[1] * x + m.mlp(m.layer_norm2(x))


def detr(m: Any, x: Tensor, call: dict[str, Any], c: Scales) -> Tensor:
    queries = call["object_queries_position_embeddings"]
    attention = m.self_attn(
        hidden_states=x, position_embeddings=queries, attention_mask=call["attention_mask"]
    )[0]
    x = m.self_attn_layer_norm(c[0] * x + attention)
    crossed = m.encoder_attn(
        hidden_states=x,
        key_value_states=call["encoder_hidden_states"],
        attention_mask=call["encoder_attention_mask"],
        position_embeddings=queries,
        encoder_position_embeddings=call["spatial_position_embeddings"],
    )[0]
    x = m.encoder_attn_layer_norm(c[0] * x + crossed)
    return m.final_layer_norm(c[1] * x + m.mlp(x))


def stock_resnet(m: Any, x: Tensor, call: dict[str, Any], c: Scales) -> Tensor:
    return m.activation(c[0] * m.shortcut(x) + m.layer(x))


def own_resnet(m: Any, x: Tensor, call: dict[str, Any], c: Scales) -> Tensor:
    if m.preactivation:
        inner = m.bn2(m.conv1(m.relu(m.bn1(x))))
        return c[0] * m.shortcut(x) + m.conv2(m.relu(inner))
    return m.relu(c[0] * m.shortcut(x) + m.bn2(m.conv2(m.relu(m.bn1(m.conv1(x))))))


def residual_mlp(m: Any, x: Tensor, call: dict[str, Any], c: Scales) -> Tensor:
    return c[1] * m.skip(x) + m.fc2(torch.relu(m.fc1(m.norm(x))))


Reference = Callable[[Any, Tensor, dict[str, Any], Scales], Tensor]

BY_HAND: dict[str, Reference] = {
    "Llama-untied-CausalLM-left": llama,
    "Mistral-window-CausalLM-left": llama,
    "Qwen2-window-CausalLM-left": llama,
    "Qwen3-window-CausalLM-right": llama,
    "GPT2-CausalLM-left": gpt2,
    "GPT2-SequenceClassification-left": gpt2,
    "GPTNeoX-parallel-CausalLM-left": neox,
    "GPTNeoX-serial-CausalLM-left": neox,
    "OPT-prenorm-CausalLM-left": opt,
    "OPT-postnorm-CausalLM-left": opt,
    "ViT": vit,
    "DeiT": vit,
    "Beit-mean-pooling": beit,
    "Beit-class-token": beit,
    "Bert-SequenceClassification": bert,
    "Roberta-MaskedLM": bert,
    "DistilBert-SequenceClassification": distilbert,
    "CLIPModel-vision": clip,
    "CLIPModel-text": clip,
    "Detr-plain": detr,
    "Detr-auxiliary": detr,
    "ResNetForImageClassification-basic": stock_resnet,
    "ResNetForImageClassification-bottleneck": stock_resnet,
    "CifarResNet-post-projection": own_resnet,
    "CifarResNet-post-pad": own_resnet,
    "CifarResNet-pre-projection": own_resnet,
    "CifarResNet-pre-pad": own_resnet,
    "ResidualMLP-norm1-skips1-regression0": residual_mlp,
    "ResidualMLP-norm0-skips0-regression1": residual_mlp,
}


def state_and_call(cursor: Cursor, module: nn.Module, layer: int) -> tuple[Tensor, dict[str, Any]]:
    """The state, and by name everything else with which the block is called."""
    call = cursor.calls[layer - 1]
    bound = inspect.signature(module.forward).bind(cursor.h, *call.args, **call.kwargs).arguments
    first = next(iter(bound))
    named = {k: v for k, v in bound.items() if k not in (first, "kwargs")}
    return cursor.h, {**named, **bound.get("kwargs", {})}


@pytest.mark.parametrize("name", BY_HAND)
@torch.no_grad()
def test_a_scaled_skip_equals_a_block_written_by_hand(name: str) -> None:
    entry = ENTRIES[name]
    model, batch = entry.make(torch.float64)
    stream = as_stream(model, **entry.options)
    layer = 2
    cursor = stream.advance(stream.start(batch), layer - 1)
    block = stream.blocks[layer - 1]
    x, call = state_and_call(cursor, block.module, layer)
    kinds = {branch.kind for branch in block.branches}
    cases: list[tuple[str, float, Scales]] = [("both", c, (c, c)) for c in (0.0, 0.3, -1.5)]
    if {"attention", "mlp"} <= kinds and not block.parallel and len(block.branches) == 2:
        cases += [("attention", 0.0, (0.0, 1.0)), ("mlp", 0.25, (1.0, 0.25))]
    for which, c, scales in cases:
        with scaled_skip(stream, layer=layer, c=c, which=which):
            found = stream.step(cursor).h
        expected = stream.after_block(BY_HAND[name](block.module, x, call, scales), layer)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["CifarResNet-post-projection", "CifarResNet-pre-pad"])
@torch.no_grad()
def test_the_skip_between_stages_is_scaled_after_its_projection(name: str) -> None:
    model, batch = ENTRIES[name].make(torch.float64)
    stream = as_stream(model)
    layer = next(i for i, b in enumerate(stream.blocks, 1) if b.branches[0].skip is not None)
    cursor = stream.advance(stream.start(batch), layer - 1)
    with scaled_skip(model, layer=layer, c=0.4):
        found = stream.step(cursor).h
    module = stream.blocks[layer - 1].module
    torch.testing.assert_close(found, own_resnet(module, cursor.h, {}, (0.4, 0.4)))


def test_a_projection_in_training_mode_counts_each_batch_once() -> None:
    model, batch = ENTRIES["CifarResNet-post-projection"].make()
    layer = next(
        i for i, b in enumerate(as_stream(model).blocks, 1) if b.branches[0].skip is not None
    )
    skip: Any = as_stream(model).blocks[layer - 1].branches[0].skip
    before = int(skip[1].num_batches_tracked)
    model.train()
    with scaled_skip(model, layer=layer, c=0.0):
        model(**batch)
    assert int(skip[1].num_batches_tracked) == before + 1


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_scaling_a_skip_by_one_changes_nothing(name: str) -> None:
    entry = ENTRIES[name]
    model, batch = entry.make()
    stream = as_stream(model, **entry.options)
    expected = stream.prediction(stream.call(stream.arguments(batch, None)))
    before = hooks(model)
    with scaled_skip(stream, layer=range(1, stream.depth + 1), c=1.0):
        assert hooks(model) == before
        found = stream.prediction(stream.call(stream.arguments(batch, None)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_skip_is_restored_also_after_an_exception(name: str) -> None:
    entry = ENTRIES[name]
    model, batch = entry.make()
    stream = as_stream(model, **entry.options)
    expected = stream.prediction(stream.call(stream.arguments(batch, None)))
    before = hooks(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle of a block")

    out = stream.blocks[0].branches[0].proj
    handle = out.register_forward_hook(fail)
    with (
        pytest.raises(RuntimeError, match="in the middle"),
        scaled_skip(stream, layer=1, c=0.5),
    ):
        stream.call(stream.arguments(batch, None))
    handle.remove()
    assert hooks(model) == before
    assert torch.equal(stream.prediction(stream.call(stream.arguments(batch, None))), expected)
    # And it can be scaled again: nothing remembers the first time.
    skipless = "skips0" in name
    with scaled_skip(stream, layer=1, c=0.5):
        changed = stream.prediction(stream.call(stream.arguments(batch, None)))
    assert torch.equal(changed, expected) == skipless


GRADIENTS = [
    "ViT",
    "OPT-prenorm-SequenceClassification-left",
    "GPTNeoX-parallel-SequenceClassification-left",
    "Bert-SequenceClassification",
    "ResNetForImageClassification-basic",
    "CifarResNet-pre-projection",
    "ResidualMLP-norm1-skips1-regression0",
]


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_through_a_scaled_skip_agree_with_finite_differences(name: str) -> None:
    model, batch = ENTRIES[name].make(torch.float64)
    stream = as_stream(model)
    start = stream.start(batch)
    start = start.select(torch.tensor([0]))
    direction = torch.randn_like(start.h)
    weights = torch.randn(stream.classes, dtype=torch.float64)

    def loss(t: Tensor) -> Tensor:
        from dataclasses import replace

        cursor = replace(start, h=start.h.detach() + t * direction)
        with scaled_skip(stream, layer=(1, 3), c=0.3):
            return (stream.logits(stream.advance(cursor)) * weights).sum()

    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (t,), eps=1e-6, atol=1e-5, rtol=1e-4)


def test_parameters_get_the_gradient_of_the_changed_network() -> None:
    model, batch = ENTRIES["GPT2-CausalLM-left"].make(torch.float64)
    stream = as_stream(model)
    weight: Any = stream.blocks[1].branches[1].proj.weight

    def loss() -> Tensor:
        return model(**batch).logits.square().mean()

    with scaled_skip(model, layer=2, c=0.25):
        (gradient,) = torch.autograd.grad(loss(), weight)
        step = 1e-6 * torch.ones_like(weight)
        with torch.no_grad():
            weight.add_(step)
            above = loss()
            weight.sub_(2 * step)
            below = loss()
            weight.add_(step)
    expected = (above - below) / 2
    torch.testing.assert_close((gradient * step).sum(), expected, rtol=1e-5, atol=1e-14)


@torch.no_grad()
def test_the_persistent_form_stays_until_it_is_removed() -> None:
    model, batch = ENTRIES["ViT"].make()
    plain = model(**batch).logits
    skip = scaled_skip(model, layer=2, c=0.0).attach()
    changed = model(**batch).logits
    assert not torch.equal(changed, plain)
    with skip:  # already in force: entering it again changes nothing
        assert torch.equal(model(**batch).logits, changed)
    assert torch.equal(model(**batch).logits, plain)


@torch.no_grad()
def test_several_layers_are_scaled_together() -> None:
    model, batch = ENTRIES["ViT"].make(torch.float64)
    with scaled_skip(model, layer=1, c=0.5), scaled_skip(model, layer=3, c=0.5):
        nested = model(**batch).logits
    with scaled_skip(model, layer=(1, 3), c=0.5):
        assert torch.equal(model(**batch).logits, nested)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Llama-untied-CausalLM-left", "GPTNeoX-parallel-CausalLM-left"])
def test_decoding_with_a_cache_sees_the_scaled_skip(name: str) -> None:
    model, batch = CAUSAL[name].make(torch.float64)
    stream = as_stream(model)
    ids = batch["input_ids"][:1]
    with scaled_skip(model, layer=2, c=0.3):
        full = stream.logits(stream.advance(stream.start({"input_ids": ids})))
        cache, steps = stream.new_cache(), []
        for t in range(ids.shape[1]):
            part = {
                "input_ids": ids[:, t : t + 1],
                "attention_mask": torch.ones_like(ids[:, : t + 1]),
            }
            steps.append(stream.logits(stream.advance(stream.start(part, cache=cache))))
    torch.testing.assert_close(torch.cat(steps, 1), full)


# -- errors ---------------------------------------------------------------------------------------


def test_a_layer_that_does_not_exist_is_named() -> None:
    model, _ = ENTRIES["ViT"].make()
    for layer in (0, 5, True):
        with pytest.raises(DepthError, match=f"layer {layer}, but the layers of .* are 1 to 4"):
            scaled_skip(model, layer=layer, c=0.0)
    with pytest.raises(DepthError, match=r"depth 0 is the embedding, .* the first layer is 1"):
        scaled_skip(model, layer=0, c=0.0)
    with pytest.raises(SettingError, match="no layer; give one or more of 1 to 4"):
        scaled_skip(model, layer=[], c=0.0)


def test_a_kind_that_the_family_lacks_is_named() -> None:
    model, _ = ENTRIES["CifarResNet-post-pad"].make()
    with pytest.raises(
        SettingError, match="which='attention', but layer 1 of CifarResNet has conv"
    ):
        scaled_skip(model, layer=1, c=0.0, which="attention")
    parallel, _ = ENTRIES["GPTNeoX-parallel-CausalLM-left"].make()
    with pytest.raises(SettingError, match="in parallel and share one skip; use which='both'"):
        scaled_skip(parallel, layer=1, c=0.0, which="mlp")


@pytest.mark.parametrize(
    ("c", "told"),
    [(float("nan"), "use a number"), (float("inf"), "use a finite number, 0 to remove the skip")],
)
def test_a_scale_that_is_not_finite_is_refused(c: float, told: str) -> None:
    model, _ = ENTRIES["ViT"].make()
    with pytest.raises(SettingError, match=told):
        scaled_skip(model, layer=1, c=c)


def test_scaling_one_skip_twice_is_refused() -> None:
    model, _ = ENTRIES["ViT"].make()
    with (
        scaled_skip(model, layer=1, c=0.0, which="mlp"),
        pytest.raises(SettingError, match=r"layer 1 of .* already has a scaled skip"),
        scaled_skip(model, layer=(1, 2), c=0.0),
    ):
        pass
    assert hooks(model) == 0


@pytest.mark.parametrize("name", ["OPT-prenorm-CausalLM-left", "Detr-plain"])
def test_dropout_that_would_drop_the_skip_is_refused_in_training(name: str) -> None:
    model, batch = ENTRIES[name].make()
    model.train()
    with (
        scaled_skip(model, layer=1, c=0.5),
        pytest.raises(UnsupportedModelError, match="would drop the skip as well"),
    ):
        model(**batch)
    assert hooks(model) == 0


def test_a_model_followed_without_branches_is_refused() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 3))
    stream = as_stream(model, blocks="0", readout="1")
    with pytest.raises(UnsupportedModelError, match="without its branches"):
        ed.scaled_skip(stream, layer=1, c=0.0)
