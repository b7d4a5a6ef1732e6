"""Loading a depth: the right tensors, and only those."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zoo import ENTRIES
from transformers import LlamaConfig, LlamaForCausalLM

from everydepth.errors import DataError, DepthError, UnsupportedModelError
from everydepth.exits import load
from everydepth.stream import as_stream


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_a_depth_of_a_checkpoint_is_the_readout_at_that_depth(name: str, tmp_path: Path) -> None:
    entry = ENTRIES[name]
    model, batch = entry.make()
    model.save_pretrained(tmp_path)
    stream = as_stream(model, **entry.options)
    depth = max(1, stream.depth // 2)
    small = as_stream(load(tmp_path, depth=depth, **entry.options), **entry.options)
    assert small.depth == depth
    assert not any(t.is_meta for t in (*small.model.parameters(), *small.model.buffers()))
    with torch.no_grad():
        found = small.prediction(small.call(small.arguments(batch, None)))
        expected = stream.observe(batch).logits(depth)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_checkpoint_in_many_files_and_half_precision_loads_at_a_depth(tmp_path: Path) -> None:
    model, batch = ENTRIES["Llama-untied-CausalLM-right"].make()
    model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    small = load(tmp_path, depth=2)
    assert small.dtype == torch.bfloat16
    with torch.no_grad():
        expected = as_stream(load(tmp_path)).observe(batch).logits(2)
        torch.testing.assert_close(small(**batch).logits, expected)


def resident(file: Path) -> int:
    """Bytes of a file that this process has touched through its memory map."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            inside = line.endswith(str(file))
        elif inside and head == "Rss:":
            total += 1024 * int(line.split()[1])
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads what is resident from /proc")
def test_blocks_beyond_the_depth_are_not_read(tmp_path: Path) -> None:
    # What is touched in memory is what is read from the disk; the model is used, so all of it is.
    config = LlamaConfig(
        hidden_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        intermediate_size=1024,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    small: Any = load(tmp_path, depth=3)
    with torch.no_grad():
        small(input_ids=torch.arange(8)[None])
    own = sum(p.numel() * p.element_size() for p in small.parameters())
    assert own < file.stat().st_size * 0.3
    assert 0.9 * own < resident(file) < 1.15 * own


def test_bad_input_is_refused_with_the_next_step(tmp_path: Path) -> None:
    model, _ = ENTRIES["ViT"].make()
    model.save_pretrained(tmp_path / "vit")
    for depth in (0, 5):
        with pytest.raises(DepthError, match=f"depth {depth}, but ViT.* has 4 blocks; use 1 to 4"):
            load(tmp_path / "vit", depth=depth)
    with pytest.raises(DataError, match=r"has no readable config.json.*save_pretrained"):
        load(tmp_path / "nowhere", depth=1)
    config = json.loads((tmp_path / "vit" / "config.json").read_text())
    other = config | {"architectures": ["WhisperForConditionalGeneration"]}
    (tmp_path / "vit" / "config.json").write_text(json.dumps(other))
    with pytest.raises(UnsupportedModelError, match=r"'WhisperFor.*' is not a model class"):
        load(tmp_path / "vit", depth=1)
    wider = config | {"hidden_size": 64}
    (tmp_path / "vit" / "config.json").write_text(json.dumps(wider))
    with pytest.raises(DataError, match="saved from another class"):
        load(tmp_path / "vit", depth=1)
    (tmp_path / "vit" / "config.json").write_text(json.dumps(config))
    (tmp_path / "vit" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(DataError, match="cannot be read"):
        load(tmp_path / "vit", depth=1)
