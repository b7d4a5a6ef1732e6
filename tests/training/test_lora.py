"""Adapters: trained at every depth, kept in PEFT's format, merged for use; off, nothing changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.zoo import ENTRIES
from typer.testing import CliRunner

import everydepth as ed
from everydepth.cli.main import build_app
from everydepth.errors import SettingError, UnsupportedModelError
from everydepth.training.lora import with_lora

LLAMA = "Llama-tied-CausalLM-left"


@pytest.mark.parametrize("kind", [LLAMA, "GPT2-CausalLM-right", "ViT"])
def test_adapters_learn_at_every_depth_and_the_model_stays(kind: str, tmp_path: Path) -> None:
    model, batch = ENTRIES[kind].make()
    model.eval()
    if kind == "ViT":
        batch = {**batch, "labels": torch.zeros(len(batch["pixel_values"]), dtype=torch.long)}
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    before, said = {k: v.clone() for k, v in model.state_dict().items()}, model(**inputs).logits
    adapted = with_lora(model, 2)
    net = ed.EveryDepth(adapted, ed.lpa().distilled())
    assert all("lora" in n for n, p in net.named_parameters() if p.requires_grad)
    done = ed.fit(net, [batch], steps=3, lr=1e-2, run=tmp_path / "run", progress=False)
    net.eval()
    assert not torch.allclose(adapted(**inputs).logits, said, atol=1e-4)
    with adapted.disable_adapter():
        assert torch.equal(adapted(**inputs).logits, said)
    assert done.path is not None
    merged = ed.load(done.path)
    assert type(merged) is type(model)
    assert torch.allclose(merged(**inputs).logits, adapted(**inputs).logits, atol=1e-4)
    fresh, _ = ENTRIES[kind].make()
    fresh.load_state_dict(before)
    again = peft.PeftModel.from_pretrained(fresh.eval(), str(done.path / "adapter"))
    assert torch.allclose(again(**inputs).logits, adapted(**inputs).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("lm_head", r"tied to its embedding.*leave the head out"),
        ("embed_tokens", r"tied to its head.*leave the embedding out"),
    ],
)
def test_an_adapter_that_would_untie_the_head_is_refused(
    target: str, said: str, tmp_path: Path
) -> None:
    model, _ = ENTRIES[LLAMA].make()
    with pytest.warns(UserWarning, match="tie"):
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=[target]))
    with pytest.raises(SettingError, match=said):
        ed.EveryDepth(adapted)
    with pytest.raises(UnsupportedModelError, match=r"head and embedding are one tensor"):
        ed.export(adapted, tmp_path / "two", depth=2)


def test_an_adapter_that_adds_tokens_is_refused() -> None:
    model, _ = ENTRIES[LLAMA].make()
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    adapted = peft.get_peft_model(model, config)
    with pytest.raises(UnsupportedModelError, match=r"adds tokens.*use an adapter that changes"):
        ed.EveryDepth(adapted)


@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_below_one_is_refused(rank: int) -> None:
    with pytest.raises(SettingError, match="use a whole number of 1 or more"):
        with_lora(ENTRIES[LLAMA].make()[0], rank)


@pytest.mark.parametrize(
    "settings", [{"target_modules": ["nowhere"]}, {"nonsense": 1}, {"lora_dropout": 5.0}]
)
def test_what_peft_refuses_is_said(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=r"PEFT cannot use .* here \(.*\); see LoraConfig"):
        with_lora(ENTRIES[LLAMA].make()[0], 2, **settings)


def test_the_command_trains_adapters(tmp_path: Path) -> None:
    small = ("--blocks", "2", "--steps", "2", "--max-samples", "40", "--batch-size", "20")
    words = ["train", "-m", "vit-tiny", "-d", "digits", *small, "--lora", "2"]
    result = CliRunner().invoke(build_app(), [*words, "--run", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").is_file()
    assert ed.load(tmp_path / "run").config.num_hidden_layers == 2


def test_a_saved_adapter_names_the_folder_of_its_model(tmp_path: Path) -> None:
    plain: Any
    plain, batch = ENTRIES[LLAMA].make()
    plain.save_pretrained(tmp_path / "base")
    adapted = with_lora(ed.load(tmp_path / "base"), 2)
    ed.fit(ed.EveryDepth(adapted), [batch], steps=2, lr=1e-2, progress=False)
    adapted.save_pretrained(tmp_path / "adapter")
    opened = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.equal(opened(**batch).logits, adapted.eval()(**batch).logits)
