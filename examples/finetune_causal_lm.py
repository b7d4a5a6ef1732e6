"""Fine-tune a causal language model so that shallow depths write, and can draft for the full one.

python examples/finetune_causal_lm.py                         # a tiny Llama, seconds, offline
python examples/finetune_causal_lm.py HuggingFaceTB/SmolLM2-135M my-text.txt
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

import everydepth as ed
from everydepth.data import token_blocks

VERSE = "the rain in spain stays mainly in the plain and the plane in spain waits for the rain. "


def tiny() -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    return LlamaForCausalLM(LlamaConfig(vocab_size=384, num_hidden_layers=4, **sizes))


def main(name: str | None = None, file: str | None = None) -> None:
    torch.manual_seed(0)
    model: Any = tiny() if name is None else AutoModelForCausalLM.from_pretrained(name)
    tokenizer: Any = ByT5Tokenizer() if name is None else AutoTokenizer.from_pretrained(name)
    text = VERSE * 20 if file is None else Path(file).read_text()
    rows = token_blocks(tokenizer(text, add_special_tokens=False)["input_ids"], 64)
    train, test = rows.split((0.8, 0.2))

    # One other depth per step, drawn anew: the vocabulary is read out twice, not once per depth.
    net = ed.EveryDepth(model, objective=ed.lpa().sampled(1))
    ed.fit(net, train, steps=150, batch_size=4, lr=3e-3 if name is None else 2e-5)
    for depth, value in enumerate(ed.trace(model, test, ["perplexity"])["perplexity"]):
        print(f"depth {depth}: perplexity {value:.2f}")

    prompt = tokenizer("the rain in", add_special_tokens=False)["input_ids"]
    plain = ed.generate(model, prompt, max_new_tokens=60)
    drafted = ed.generate(model, prompt, max_new_tokens=60, draft_depth=2, draft_always=True)
    print(tokenizer.decode(drafted.sequences[0]))
    print(f"same text: {drafted.tokens == plain.tokens}; {drafted.stats.acceptance:.0%} accepted")
    net.save_pretrained("language-model-every-depth")  # a plain model of its class


if __name__ == "__main__":
    main(*sys.argv[1:])
