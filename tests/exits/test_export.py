"""Exports: stock checkpoints that need no everydepth, whole or not at all."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.zoo import ENTRIES, MODELS
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import everydepth as ed
from everydepth.errors import (
    DepthError,
    ExportError,
    PolicyError,
    SettingError,
    UnsupportedModelError,
)
from everydepth.exits import Confidence, Policy, export, load, predict, profile
from everydepth.stream import as_stream

STOCK = {
    name: entry
    for name, entry in MODELS.items()
    if not name.startswith(("CifarResNet", "ResidualMLP", "CLIPModel"))
}

# Runs where everydepth cannot be imported; loads each export with a stock Auto class.
ELSEWHERE = """
import sys
sys.modules["everydepth"] = None
import json, torch, transformers
from pathlib import Path
from safetensors.torch import load_file, save_file
root = Path(sys.argv[1])
logits = {}
for name, auto in json.loads((root / "autos.json").read_text()).items():
    model = getattr(transformers, auto).from_pretrained(root / name).eval()
    with torch.no_grad():
        output = model(**load_file(root / f"{name}.inputs"))
    logits[name] = output[0] if output[0].ndim else output[1]
    for key in ("logits", "image_embeds", "text_embeds"):
        if getattr(output, key, None) is not None:
            logits[name] = getattr(output, key)
save_file({k: v.contiguous() for k, v in logits.items()}, root / "logits")
try:
    import everydepth
except ImportError:
    print("loaded without everydepth")
"""


def auto_class(model: nn.Module) -> str:
    name = type(model).__name__
    for ending, auto in (
        ("ForImageClassification", "AutoModelForImageClassification"),
        ("ForSequenceClassification", "AutoModelForSequenceClassification"),
        ("ForMaskedLM", "AutoModelForMaskedLM"),
        ("ForObjectDetection", "AutoModelForObjectDetection"),
        ("ForCausalLM", "AutoModelForCausalLM"),
        ("LMHeadModel", "AutoModelForCausalLM"),
    ):
        if name.endswith(ending):
            return auto
    return name  # CLIP's towers with a projection have no Auto class


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_stock_family_loads_at_half_depth_where_everydepth_cannot_be_imported(
    tmp_path: Path,
) -> None:
    autos: dict[str, str] = {}
    expected: dict[str, torch.Tensor] = {}
    for name, entry in STOCK.items():
        model, batch = entry.make()
        stream = as_stream(model)
        depth = max(1, stream.depth // 2)
        export(model, tmp_path / name, depth=depth)
        save_file(batch, tmp_path / f"{name}.inputs")
        autos[name] = auto_class(model)
        with torch.no_grad():
            expected[name] = stream.observe(batch).logits(depth)
    (tmp_path / "autos.json").write_text(json.dumps(autos))
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert "loaded without everydepth" in done.stdout, done.stderr[-2000:]
    found = load_file(tmp_path / "logits")
    assert found.keys() == expected.keys()
    for name, logits in expected.items():
        gap = float((found[name] - logits).abs().max()) / max(1.0, float(logits.abs().max()))
        assert gap <= 1e-6, f"{name} is off by {gap:.1e}"


@pytest.mark.parametrize(
    "name", ["CifarResNet-pre-projection", "ResidualMLP-norm1-skips1-regression0"]
)
def test_our_own_models_load_again(name: str, tmp_path: Path) -> None:
    model, batch = ENTRIES[name].make()
    export(model, tmp_path / "out", depth=3)
    with torch.no_grad():
        found = load(tmp_path / "out")(**batch).logits
        torch.testing.assert_close(found, as_stream(model).observe(batch).logits(3))


def test_an_export_holds_config_weights_card_and_what_was_given(tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, save_directory: str) -> None:
            (Path(save_directory) / "tokenizer.json").write_text("{}")

    model, batch = ENTRIES["ViT"].make()
    found = profile(model, batch, repeats=1, progress=False)
    out = export(model, tmp_path / "deep" / "out", depth=2, tokenizer=Tokenizer(), profile=found)
    assert files(out) == [
        "README.md",
        "config.json",
        "everydepth.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 2
    card = (out / "README.md").read_text()
    assert "2 of 4 blocks" in card
    assert found.table().markdown() in card
    assert "ViTForImageClassification.from_pretrained" in card
    assert files(out.parent) == ["out"]


def test_the_card_of_a_balcony_says_which_blocks_the_model_has(tmp_path: Path) -> None:
    model, _ = ENTRIES["Llama-tied-CausalLM-right"].make()
    out = export(ed.balcony(model, [2], blocks=1), tmp_path / "out", depth=2)
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 3
    card = (out / "README.md").read_text()
    assert "# LlamaForCausalLM, 2 of 4 blocks and a balcony of 1\n" in card
    assert "The first 2 of 4 blocks and a balcony of 1, with the network's own head." in card


def test_a_decoder_is_cut_and_its_encoder_is_not(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 3, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, vocab_size=40)).eval()
    said = {"blocks": "decoder.block", "readout": ("decoder.final_layer_norm", "lm_head")}
    said |= {"task": "causal_lm"}
    ids = torch.randint(3, 40, (2, 5))
    batch = {"input_ids": ids, "decoder_input_ids": ids[:, :3]}
    folder = export(model, tmp_path / "cut", depth=1, example=batch, **said)
    opened = T5ForConditionalGeneration.from_pretrained(folder)
    assert (len(opened.encoder.block), len(opened.decoder.block)) == (3, 1)


def test_what_the_stock_class_opens_as_another_model_is_not_written(tmp_path: Path) -> None:
    model, _ = ENTRIES["Llama-untied-CausalLM-left"].make()
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.ReLU()  # the config still says another function
    with pytest.raises(
        ExportError,
        match=r"nothing was written: LlamaForCausalLM.* its predictions differ by up to",
    ):
        export(model, tmp_path / "cut", depth=2)
    model.model.layers[0].mlp.extra = nn.Linear(2, 2)
    with pytest.raises(ExportError, match=r"model\.layers\.0\.mlp\.extra.* does not fit"):
        export(model, tmp_path / "cut", depth=2)
    assert not (tmp_path / "cut").exists()


def test_the_exported_model_is_left_as_it_was(tmp_path: Path) -> None:
    model, _ = ENTRIES["ResNetForImageClassification-basic"].make()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config: Any = model.config
    text = config.to_json_string()
    export(model, tmp_path / "out", depth=1)
    assert model.training
    assert config.to_json_string() == text
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_policy_travels_with_the_full_model(tmp_path: Path) -> None:
    model, batch = ENTRIES["ViT"].make()
    from everydepth.exits.identity import identity

    policy = Confidence(threshold=0.2, model=identity(as_stream(model)))
    out = export(model, tmp_path / "out", exits=policy)
    again = Policy.load(out / "exit_policy.json")
    expected = predict(model, batch, policy=policy)
    assert torch.equal(predict(load(out), batch, policy=again).depths, expected.depths)
    assert "without a guarantee" in (out / "README.md").read_text()


def test_an_existing_export_is_replaced_only_if_told(tmp_path: Path) -> None:
    model, _ = ENTRIES["ViT"].make()
    out = export(model, tmp_path / "out", depth=2)
    with pytest.raises(ExportError, match="already holds an export; pass overwrite=True"):
        export(model, out, depth=3)
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 2
    export(model, out, depth=3, overwrite=True)
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 3
    assert files(tmp_path) == ["out"]


def test_a_directory_with_other_files_is_never_touched(tmp_path: Path) -> None:
    model, _ = ENTRIES["ViT"].make()
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ExportError, match=r"holds thesis.txt and is not an export"):
        export(model, tmp_path, overwrite=True)
    with pytest.raises(ExportError, match="is a file; choose a new directory"):
        export(model, tmp_path / "thesis.txt", overwrite=True)
    assert files(tmp_path) == ["thesis.txt"]


@contextmanager
def small_disk(most: int) -> Iterator[None]:
    """No file of this process may grow beyond `most` bytes: writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_leaves_no_half_export_and_the_old_one_whole(tmp_path: Path) -> None:
    model, batch = ENTRIES["ViT"].make()
    out = export(model, tmp_path / "out", depth=1)
    with small_disk(20_000), pytest.raises(ExportError, match=r"was not written: .*nothing of it"):
        export(model, tmp_path / "new")
    with small_disk(20_000), pytest.raises(ExportError, match="was not written"):
        export(model, out, overwrite=True)
    assert files(tmp_path) == ["out"]
    with torch.no_grad():
        assert torch.equal(load(out)(**batch).logits, as_stream(model).observe(batch).logits(1))


def test_batch_norm_statistics_are_estimated_anew_on_request(tmp_path: Path) -> None:
    model, _ = ENTRIES["CifarResNet-pre-projection"].make()
    data = [{"pixel_values": 3 * torch.randn(16, 3, 32, 32) + 1} for _ in range(3)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    small: Any = load(export(model, tmp_path / "out", depth=2, recalibrate=data))
    # Plain reference: mean over batches of the mean of what the first norm receives.
    with torch.no_grad():
        means = torch.stack([model.conv1(b["pixel_values"]).mean((0, 2, 3)) for b in data])
    found = small.layer1[0].bn1.running_mean
    torch.testing.assert_close(found, means.mean(0), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, before["layer1.0.bn1.running_mean"])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    vit, batch = ENTRIES["ViT"].make()
    with pytest.raises(SettingError, match=r"ViT.* has no batch norm; leave it out"):
        export(vit, tmp_path / "vit", recalibrate=[batch])


def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model, _ = ENTRIES["ViT"].make()
    out = tmp_path / "out"
    for depth in (0, 5, -1):
        with pytest.raises(DepthError, match=f"depth {depth}, but ViT.* has 4 blocks; use 1 to 4"):
            export(model, out, depth=depth)
    with pytest.raises(SettingError, match="depth=2 with exits="):
        export(model, out, depth=2, exits=Confidence(threshold=0.5))
    with pytest.raises(PolicyError, match="thresholds for 3 depths"):
        export(model, out, exits=Confidence(threshold=(0.5, 0.5)))
    with pytest.raises(SettingError, match="format='onnx' needs example="):
        export(model, out, format="onnx")
    plain = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    with pytest.raises(UnsupportedModelError, match=r"not a Hugging Face model.*format='onnx'"):
        export(plain, out, blocks="0", readout="1")
    assert files(tmp_path) == []
