"""A small language model that talks, with a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = 1


@dataclass(frozen=True)
class Talker:
    model: LlamaForCausalLM
    tokenizer: Any

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]


@pytest.fixture(scope="session")
def talker() -> Talker:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "</s>": END} | {c: i for i, c in enumerate(alphabet, start=2)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=END,
        pad_token_id=0,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = LlamaForCausalLM(config).double().eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.mul_(8)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return Talker(model, fast)
