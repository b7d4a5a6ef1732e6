"""Hugging Face models as GGUF files: llama.cpp says what the model says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers as hf
from tests.helpers.tokenizing import byte_level, sentencepiece
from tokenizers import pre_tokenizers
from typer.testing import CliRunner

import everydepth as ed
from everydepth.cli.main import build_app
from everydepth.engines import gguf_model
from everydepth.engines.gguf_file import GGUF
from everydepth.errors import ExportError, SettingError, UnsupportedModelError

WIDTH, HEADS, BLOCKS = 32, 4, 3
PARTIAL = {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5}
WHOLE = {"partial_rotary_factor": 1.0}


def language_model(kind: str, tokenizer: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    shape = {
        "vocab_size": len(tokenizer) + 3,  # a few rows without a token, as in many checkpoints
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    config = getattr(hf, f"{kind}Config")(**(shape | settings))
    return getattr(hf, f"{kind}ForCausalLM")(config).eval()


KINDS: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("Llama", torch.float32, {"tie_word_embeddings": True}),
    ("Llama", torch.bfloat16, {"head_dim": 16, "rope_theta": 100000}),
    ("Mistral", torch.float16, {"sliding_window": None}),
    ("Qwen2", torch.float32, {}),
    ("Qwen3", torch.float32, {"head_dim": 16}),
]
# The package gguf writes these; transformers does not read all of them.
OTHERS: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("Arcee", torch.float32, {"head_dim": 8}),
    ("Ernie4_5", torch.float32, {"head_dim": 8}),
    ("Olmo2", torch.float32, {"pad_token_id": None, "eos_token_id": 0}),
    ("Phi3", torch.float32, {"pad_token_id": None, "rope_parameters": PARTIAL}),
    ("SeedOss", torch.float32, {"head_dim": 8}),
    ("SmolLM3", torch.float32, {"pad_token_id": None, "num_hidden_layers": 5}),
    ("StableLm", torch.float32, {"rope_parameters": PARTIAL}),
    # llama.cpp looks its activation up in a table of half precision.
    ("Starcoder2", torch.float16, {"sliding_window": None, "rope_parameters": PARTIAL | WHOLE}),
]


@pytest.mark.parametrize(("kind", "dtype", "settings"), OTHERS)
def test_llama_cpp_agrees_with_other_architectures(
    kind: str, dtype: torch.dtype, settings: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = byte_level()
    model = language_model(kind, tokenizer, bos_token_id=0, **settings).to(dtype)
    depth = model.config.num_hidden_layers - 1  # four blocks of SmolLM3: the last has no positions
    out = ed.export(model, tmp_path / "out", depth=depth, format="gguf", tokenizer=tokenizer)
    assert GGUF.read(out / "model.gguf").depth == depth


def test_every_architecture_that_can_be_written_is_tested() -> None:
    types = {getattr(hf, f"{kind}Config").model_type for kind, *_ in (*KINDS, *OTHERS)}
    assert types == gguf_model._NAMES.keys()


@pytest.mark.parametrize(("kind", "dtype", "settings"), KINDS)
def test_llama_cpp_gives_the_log_probabilities_of_the_cut_model(
    kind: str, dtype: torch.dtype, settings: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = sentencepiece() if kind in ("Llama", "Mistral") else byte_level()
    model = language_model(kind, tokenizer, **settings).to(dtype)
    out = ed.export(model, tmp_path / "out", depth=2, format="gguf", tokenizer=tokenizer)
    assert sorted(f.name for f in out.iterdir()) == ["README.md", "everydepth.json", "model.gguf"]
    assert json.loads((out / "everydepth.json").read_text())["depth"] == 2
    reader = gguf.GGUFReader(out / "model.gguf")
    names = {tensor.name for tensor in reader.tensors}
    assert max(name for name in names if name.startswith("blk")).startswith("blk.1.")
    assert ("output.weight" in names) != bool(settings.get("tie_word_embeddings"))
    # What was written reads back as the model, by transformers' own reader.
    small = ed.at_depth(model, 2)
    read = hf.AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf", dtype=dtype)
    for name, tensor in small.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name


@pytest.mark.parametrize(("weights", "kind"), [("int8", "Q8_0"), ("int4", "Q4_0")])
def test_fewer_bits_say_what_they_cost_at_every_depth(
    weights: Any, kind: str, tmp_path: Path
) -> None:
    tokenizer = sentencepiece()
    model = language_model("Llama", tokenizer, initializer_range=0.1)
    ids = torch.arange(3, 51).reshape(4, 12)
    out = ed.export(
        model,
        tmp_path / "out",
        format="gguf",
        tokenizer=tokenizer,
        weights=weights,
        data={"input_ids": ids, "labels": ids},
    )
    tensors = gguf.GGUFReader(out / "model.gguf").tensors
    assert {t.tensor_type.name for t in tensors if "norm" not in t.name} == {kind}
    card = (out / "README.md").read_text()
    assert "The perplexity at every depth, on 4 samples:" in card
    rows = [line.split("|")[1:4] for line in card.splitlines() if re.match(r"\| \d", line)]
    assert [int(depth) for depth, *_ in rows] == [1, 2, 3]
    # What is measured is the file: transformers' own reader gives the same model.
    read = hf.AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf")
    profile = ed.profile(read, [{"input_ids": ids, "labels": ids}], repeats=1, progress=False)
    for (_, _, found), depth in zip(rows, profile.depths, strict=True):
        assert float(found) == pytest.approx(depth.quality, rel=1e-3)
    # Read so, its weights are plain, and a checkpoint of it says nothing of the file.
    again = ed.export(read, tmp_path / "again", depth=2)
    assert "quantization_config" not in (again / "config.json").read_text()
    assert hasattr(read.config, "quantization_config")


def test_a_file_that_answers_otherwise_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotary pairs left as transformers has them."""
    tokenizer = sentencepiece()
    model = language_model("Llama", tokenizer)
    monkeypatch.setattr(gguf_model, "_interleaved", lambda tensor, heads: tensor)
    with pytest.raises(ExportError, match=r"log-probabilities of llama.cpp differ by"):
        ed.export(model, tmp_path / "out", format="gguf", tokenizer=tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_llama_cpp_uses_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_level()
    monkeypatch.setattr("everydepth.engines.gguf_tokens._pairs", lambda merges: [("z", "z")])
    with pytest.raises(ExportError, match=r"llama.cpp tokenizes .Once upon.*nothing was written"):
        ed.export(
            language_model("Qwen2", tokenizer), tmp_path / "o", format="gguf", tokenizer=tokenizer
        )
    assert list(tmp_path.iterdir()) == []


def test_a_head_counts_as_tied_by_its_tensor(tmp_path: Path) -> None:
    """The config says that it is the embedding, the tensor says otherwise, and is written."""
    tokenizer = sentencepiece()
    model = language_model("Llama", tokenizer, tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0).clone())
    out = ed.export(model, tmp_path / "out", format="gguf", tokenizer=tokenizer)
    tensors = gguf.GGUFReader(out / "model.gguf").tensors
    assert "output.weight" in {tensor.name for tensor in tensors}


def test_the_command_takes_the_tokenizer_beside_the_model(tmp_path: Path) -> None:
    tokenizer = sentencepiece()
    language_model("Llama", tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    arguments = ["export", str(tmp_path / "model"), str(tmp_path / "out"), "--format", "gguf"]
    result = CliRunner().invoke(build_app(), [*arguments, "--depth", "1"])
    assert result.exit_code == 0, result.output
    assert GGUF.read(tmp_path / "out" / "model.gguf").depth == 1


def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    tokenizer = sentencepiece()
    model, out = language_model("Llama", tokenizer), tmp_path / "out"

    def export(model: Any, **options: Any) -> None:
        ed.export(model, out, format="gguf", **options)

    with pytest.raises(SettingError, match="format='gguf' needs tokenizer="):
        export(model)
    with pytest.raises(SettingError, match="weights='int4' with format='gguf' needs data=: texts"):
        export(model, tokenizer=tokenizer, weights="int4")
    with pytest.raises(
        SettingError, match="leave out example, which does not apply to format='gguf'"
    ):
        export(model, tokenizer=tokenizer, example={"input_ids": torch.ones(2, 4).long()})
    other = hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=400))
    with pytest.raises(UnsupportedModelError, match=r"is a gpt2 model.*unlike .*llama, mistral"):
        export(other, tokenizer=tokenizer)
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UnsupportedModelError, match="position scaling"):
        export(language_model("Llama", tokenizer, rope_parameters=scaled), tokenizer=tokenizer)
    with pytest.raises(UnsupportedModelError, match="uses sliding windows of 8 tokens"):
        export(language_model("Mistral", tokenizer, sliding_window=8), tokenizer=tokenizer)
    with pytest.raises(
        UnsupportedModelError, match=r"a token \d+, but the model has only 20 embeddings"
    ):
        export(language_model("Llama", tokenizer, vocab_size=20), tokenizer=tokenizer)
    odd = byte_level(pre_tokenizers.Sequence([pre_tokenizers.Punctuation()]))
    with pytest.raises(UnsupportedModelError, match="splits words by Punctuation"):
        export(language_model("Qwen2", odd), tokenizer=odd)
    with pytest.raises(
        SettingError, match="format='onnx' for a GGUF file, which stays one; leave it"
    ):
        ed.export("model.gguf", out, depth=1, format="onnx")
    assert list(tmp_path.iterdir()) == []
