"""Hugging Face models as GGUF files: llama.cpp says what the model says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from typer.testing import CliRunner

import everydepth as ed
from everydepth.cli.main import build_app
from everydepth.engines import gguf_model
from everydepth.engines.gguf_file import GGUF
from everydepth.errors import ExportError, SettingError, UnsupportedModelError

WIDTH, HEADS, BLOCKS = 32, 4, 3
MERGES = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("i", "n")]
BYTE_MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ġ", "a"), ("i", "n")]


def sentencepiece() -> hf.PreTrainedTokenizerFast:
    """Characters, a few merges, and bytes for the rest; as Llama's."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzO,.'$"]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["".join(merge) for merge in MERGES] + letters
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(
        models.BPE(vocabulary, MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.decoder = decoders.ByteFallback()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def byte_level(pre: Any = None) -> hf.PreTrainedTokenizerFast:
    """Bytes and a few merges; as GPT-2's."""
    words = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += ["".join(merge) for merge in BYTE_MERGES]
    backend = Tokenizer(models.BPE({w: n for n, w in enumerate(words)}, BYTE_MERGES))
    backend.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|end|>", eos_token="<|end|>"
    )


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


@pytest.mark.parametrize(
    ("kind", "dtype", "settings"),
    [
        ("Llama", torch.float32, {"tie_word_embeddings": True}),
        ("Llama", torch.bfloat16, {"head_dim": 16, "rope_theta": 100000}),
        ("Mistral", torch.float16, {"sliding_window": None}),
        ("Qwen2", torch.float32, {}),
        ("Qwen3", torch.float32, {"head_dim": 16}),
    ],
)
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
    with pytest.raises(ExportError, match=r"llama.cpp cuts .Once upon.*nothing was written"):
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
    with pytest.raises(SettingError, match="example was given for format='gguf'"):
        export(model, tokenizer=tokenizer, example={"input_ids": torch.ones(2, 4).long()})
    other = hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=400))
    with pytest.raises(UnsupportedModelError, match=r"is a gpt2 model.*llama, mistral.* can be"):
        export(other, tokenizer=tokenizer)
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UnsupportedModelError, match="scales its positions"):
        export(language_model("Llama", tokenizer, rope_parameters=scaled), tokenizer=tokenizer)
    with pytest.raises(UnsupportedModelError, match="attends to the last 8 tokens only"):
        export(language_model("Mistral", tokenizer, sliding_window=8), tokenizer=tokenizer)
    with pytest.raises(UnsupportedModelError, match=r"a token \d+, but the model 20 embeddings"):
        export(language_model("Llama", tokenizer, vocab_size=20), tokenizer=tokenizer)
    odd = byte_level(pre_tokenizers.Sequence([pre_tokenizers.Punctuation()]))
    with pytest.raises(UnsupportedModelError, match="splits words by Punctuation"):
        export(language_model("Qwen2", odd), tokenizer=odd)
    with pytest.raises(SettingError, match="format='onnx' of a GGUF file; leave it out"):
        ed.export("model.gguf", out, depth=1, format="onnx")
    assert list(tmp_path.iterdir()) == []
