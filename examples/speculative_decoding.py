"""The same text in fewer rounds: a shallow depth drafts, the full depth checks several at once.

A small Llama learns a nursery rhyme at every depth (the LPA objective: every depth predicts through
the one head), then continues it with and without drafts. Runs in seconds, without a network.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import everydepth as ed

RHYME = (
    "the itsy bitsy spider climbed up the water spout. down came the rain and washed the spider "
    "out. out came the sun and dried up all the rain, and the itsy bitsy spider climbed up again. "
)
LETTERS = sorted(set(RHYME))


def encoded(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def trained(steps: int = 90) -> LlamaForCausalLM:
    """Eq. 11 of the paper: the last depth's loss, plus a tenth of every other depth's."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(LETTERS), num_hidden_layers=6, **sizes))
    stream = ed.as_stream(model)
    ids = torch.tensor([encoded(RHYME)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        states = stream.observe({"input_ids": ids})
        losses = [cross_entropy(states.logits(d)[0, :-1], ids[0, 1:]) for d in range(1, 7)]
        optimizer.zero_grad()
        (losses[-1] + 0.1 * sum(losses[:-1])).backward()
        optimizer.step()
    return model


def main() -> None:
    model, prompt = trained(), encoded("the itsy bitsy")
    plain = ed.generate(model, prompt, max_new_tokens=120, eos_token_id=())
    settings = {"max_new_tokens": 120, "eos_token_id": ()}
    drafted = ed.generate(model, prompt, draft_depth=1, draft_always=True, **settings)
    print("".join(LETTERS[token] for token in drafted.sequences[0].tolist()))
    print(f"same tokens: {drafted.tokens == plain.tokens}")
    print(f"{drafted.stats.acceptance:.0%} of the drafts of depth 1 were accepted,")
    print(f"so 120 tokens took {len(drafted.stats.draft_lengths)} checks instead of 119 steps")


if __name__ == "__main__":
    main()
