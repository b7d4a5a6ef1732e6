"""Wrapped models are the same model: adapted, compiled, parallel, sharded, offloaded, quantized."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import peft
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from tests.zoo import ENTRIES, TEXT, VOCABULARY
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
    ViTForImageClassification,
)

import everydepth as ed
from everydepth.errors import SettingError, UnsupportedModelError

Batch = dict[str, Tensor]
Wrap = Callable[[nn.Module], nn.Module]

DEPTH = 4


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def _llama() -> PreTrainedModel:
    model, _ = ENTRIES["Llama-untied-CausalLM-left"].make()
    assert isinstance(model, LlamaForCausalLM)
    return model


def _gemma() -> PreTrainedModel:
    """Sandwich norms, soft-capped logits, a tied head: nobody declared it."""
    sizes = {key: value for key, value in TEXT.items() if key != "num_labels"}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, num_key_value_heads=2, head_dim=8)).eval()


def _batch() -> Batch:
    ids = torch.randint(3, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids}


def _labeled() -> Batch:
    batch = _batch()
    return {**batch, "labels": batch["input_ids"]}


def _lora(model: nn.Module) -> nn.Module:
    wanted = ["q_proj", "o_proj", "down_proj"]
    config = peft.LoraConfig(target_modules=wanted, init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def _ia3(model: nn.Module) -> nn.Module:
    wanted = ["k_proj", "v_proj", "down_proj"]
    config = peft.IA3Config(
        target_modules=wanted, feedforward_modules=["down_proj"], init_ia3_weights=False
    )
    adapted = peft.get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(2)
    for name, parameter in adapted.named_parameters():
        if "ia3_l" in name:
            parameter.data += torch.randn(parameter.shape, generator=generator) / 4
    return adapted


def _compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # pyright: ignore[reportReturnType]


def _sharded(model: nn.Module) -> nn.Module:
    for block in ed.as_stream(model).blocks:
        fully_shard(block.module)
    return fully_shard(model)


def _same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def _reads(wrapped: nn.Module) -> list[Tensor]:
    """The stream of the wrapped model is followed, checked, traced and decoded."""
    own = wrapped(**_batch()).logits
    stream = ed.as_stream(wrapped)
    states = stream.observe(_batch())
    assert torch.equal(states.logits(stream.depth), own)
    report = ed.check_stream(wrapped, _batch())
    assert report.ok, str(report)
    found = ed.trace(wrapped, [_labeled()], metrics=["loss", "weight_std"], progress=False)
    assert found["loss"].shape == (stream.depth + 1,)
    plain = ed.generate(wrapped, _batch()["input_ids"], max_new_tokens=3)
    drafted = ed.generate(wrapped, _batch()["input_ids"], max_new_tokens=3, draft_depth=1)
    assert plain.tokens == drafted.tokens
    return [states.logits(depth) for depth in range(len(states))]


def _trains(wrapped: nn.Module, tmp_path: Path) -> None:
    before = {n: p.detach().clone() for n, p in wrapped.named_parameters() if p.requires_grad}
    net = ed.EveryDepth(wrapped, objective=ed.lpa())
    ed.fit(net, [_labeled()], epochs=1, run=tmp_path / "run", progress=False)
    after = dict(wrapped.named_parameters())
    assert any(not torch.equal(value, after[name]) for name, value in before.items())


@torch.no_grad()
def _cuts(wrapped: nn.Module, stock: type[PreTrainedModel], tmp_path: Path) -> nn.Module:
    """What is cut or exported is the wrapped model at that depth; the wrapped one is left alone."""
    wanted = ed.as_stream(wrapped).observe(_batch())
    small = ed.at_depth(wrapped, 2)
    _same(small(**_batch()).logits, wanted.logits(2))
    opened = stock.from_pretrained(ed.export(wrapped, tmp_path / "cut", depth=2))
    assert ed.as_stream(opened).depth == 2
    _same(opened(**_batch()).logits, wanted.logits(2))
    _same(wrapped(**_batch()).logits, wanted.logits(DEPTH))
    big = ed.insert(wrapped, after=2).eval()
    assert ed.as_stream(big).depth == DEPTH + 1
    _same(big(**_batch()).logits, wanted.logits(DEPTH))
    return small


@pytest.mark.parametrize("build", [_llama, _gemma])
@pytest.mark.parametrize("adapt", [_lora, _ia3])
def test_an_adapted_model_is_cut_exported_and_trained_with_its_adapter(
    build: Callable[[], PreTrainedModel], adapt: Wrap, tmp_path: Path
) -> None:
    base = build()
    adapted = adapt(copy.deepcopy(base))
    logits = _reads(adapted)
    with torch.no_grad():
        assert not torch.allclose(logits[-1], base(**_batch()).logits, atol=1e-3)
    small = _cuts(adapted, type(base), tmp_path)
    assert isinstance(small, peft.PeftModel)
    _trains(adapted, tmp_path)


def test_an_adapter_is_exported_for_the_cut_base(tmp_path: Path) -> None:
    base = _llama()
    adapted = _lora(copy.deepcopy(base))
    folder = ed.export(adapted, tmp_path / "adapter", depth=2, format="peft")
    assert (folder / "adapter_model.safetensors").is_file()
    opened = peft.PeftModel.from_pretrained(ed.at_depth(base, 2), str(folder)).eval()
    with torch.no_grad():
        wanted = ed.as_stream(adapted).observe(_batch()).logits(2)
        _same(opened(**_batch()).logits, wanted)


def test_an_adapter_is_not_exported_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="LlamaForCausalLM has no PEFT adapter; use format="):
        ed.export(_llama(), tmp_path / "adapter", format="peft")


def test_a_head_that_is_trained_beside_an_adapter_is_exported(tmp_path: Path) -> None:
    base, batch = ENTRIES["ViT"].make()
    assert isinstance(base, ViTForImageClassification)
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["classifier"])
    adapted = peft.get_peft_model(copy.deepcopy(base), config).eval()
    assert ed.check_stream(adapted, batch).ok
    for name, parameter in adapted.named_parameters():
        if "modules_to_save" in name:
            parameter.data.normal_()
    opened = type(base).from_pretrained(ed.export(adapted, tmp_path / "cut", depth=2))
    with torch.no_grad():
        wanted = ed.as_stream(adapted).observe(batch).logits(2)
        _same(opened(**batch).logits, wanted)


def test_a_prompt_tuning_adapter_is_refused() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    adapted = peft.get_peft_model(_llama(), config)
    with pytest.raises(UnsupportedModelError, match=r"prompt-tuning adapter.*get_base_model\(\)"):
        ed.as_stream(adapted)
    assert ed.as_stream(adapted.get_base_model()).depth == ed.as_stream(_llama()).depth


@pytest.mark.parametrize("build", [_llama, _gemma])
def test_a_compiled_model_is_the_same_model(
    build: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    model = build()
    wrapped = _compiled(model)
    _reads(wrapped)
    _cuts(wrapped, type(model), tmp_path)
    _trains(wrapped, tmp_path)


def test_a_model_compiled_in_place_is_refused() -> None:
    model = _llama()
    model.compile(backend="eager")
    with pytest.raises(UnsupportedModelError, match="was compiled in place"):
        ed.as_stream(model)


def test_a_model_of_which_the_part_with_the_blocks_is_compiled_is_refused() -> None:
    model = _llama()
    whole = model.model
    model.model = torch.compile(whole, backend="eager")
    said = r"model of LlamaForCausalLM is compiled.*\(model\.model = model\.model\._orig_mod\)"
    with pytest.raises(UnsupportedModelError, match=said):
        ed.as_stream(model)
    model.model = model.model._orig_mod
    assert ed.as_stream(model).depth == len(whole.layers)


@pytest.mark.parametrize("build", [_llama, _gemma])
def test_a_data_parallel_model_is_the_same_model(
    build: Callable[[], PreTrainedModel], tmp_path: Path, group: None
) -> None:
    model = build()
    wrapped = DistributedDataParallel(model)
    _reads(wrapped)
    _cuts(wrapped, type(model), tmp_path)
    _trains(wrapped, tmp_path)


@pytest.mark.parametrize("build", [_llama, _gemma])
def test_a_sharded_model_is_read_and_trained_and_refuses_to_be_cut(
    build: Callable[[], PreTrainedModel], tmp_path: Path, group: None
) -> None:
    wrapped = _sharded(build())
    _reads(wrapped)
    for act in (
        lambda: ed.at_depth(wrapped, 2),
        lambda: ed.insert(wrapped, after=2),
        lambda: ed.export(wrapped, tmp_path / "cut", depth=2),
        lambda: ed.profile(wrapped, [_labeled()]),
    ):
        with pytest.raises(UnsupportedModelError, match=r"is sharded .* gather it first"):
            act()
    ed.EveryDepth(wrapped)(**_labeled()).loss.backward()
    assert all(p.grad is not None for p in wrapped.parameters())


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("build", [_llama, _gemma])
def test_an_offloaded_model_is_the_same_model_and_refuses_to_be_trained(
    build: Callable[[], PreTrainedModel], where: str, tmp_path: Path
) -> None:
    model = build()
    stock, device = type(model), torch.device("cpu")
    if where == "cpu":
        wrapped = cpu_offload(model, device)
    else:
        wrapped = disk_offload(model, str(tmp_path / "weights"), device)
    assert all(p.device.type == "meta" for p in wrapped.parameters())
    _reads(wrapped)
    small = _cuts(wrapped, stock, tmp_path)
    assert all(p.device.type == "cpu" for p in small.parameters())
    with pytest.raises(UnsupportedModelError, match=r"are offloaded; load it without device_map"):
        ed.EveryDepth(wrapped)


@pytest.mark.slow
def test_a_model_quantized_by_torchao_is_read_and_cut_and_refuses_what_needs_plain_weights(
    tmp_path: Path,
) -> None:
    # In a process of its own: libraries that find torchao import it, and it warns.
    beside = Path(sys.prefix) / "torchao"
    assert (beside / "torchao").is_dir(), "run `make slow`, which installs torchao beside the rest"
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root), str(beside)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.quantized", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
