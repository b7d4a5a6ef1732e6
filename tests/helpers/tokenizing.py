"""Small tokenizers of the two common kinds."""

from __future__ import annotations

from typing import Any

import transformers as hf
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

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
