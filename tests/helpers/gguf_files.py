"""Tiny GGUF files, written by the gguf package rather than by our own writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

WIDTH, HEADS, INNER, BLOCKS = 32, 4, 64, 3


def write_tiny(
    path: Path,
    *,
    architecture: str = "llama",
    blocks: int = BLOCKS,
    quantized: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """A random Llama whose vocabulary is the 256 bytes; half of its matrices are Q8_0."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(blocks)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length([INNER] * blocks)  # one entry per block, as hybrids have
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_size_label("tiny")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3] + [6] * 256)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (extra or {}).items():
        writer.add_uint32(key, value)

    def add(name: str, *shape: int) -> None:
        values = rng.normal(0, 0.3, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, 1 + values)
        elif quantized and ("ffn" in name or "attn_q" in name):
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)

    add("token_embd.weight", len(tokens), WIDTH)
    for block in range(blocks):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{block}.{part}.weight", WIDTH, WIDTH)
        for part, shape in (
            ("ffn_gate", (INNER, WIDTH)),
            ("ffn_up", (INNER, WIDTH)),
            ("ffn_down", (WIDTH, INNER)),
            ("attn_norm", (WIDTH,)),
            ("ffn_norm", (WIDTH,)),
        ):
            add(f"blk.{block}.{part}.weight", *shape)
    add("output_norm.weight", WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
