"""Deepen a small language model by one block: the same function first, then a better one."""

from __future__ import annotations

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

import everydepth as ed
from everydepth.data import token_blocks

TEXT = "".join(part.__doc__ or "" for part in (ed, ed.grow, ed.insert, ed.sweep))


def main() -> None:
    torch.manual_seed(0)
    rows = token_blocks(list((TEXT * 3).encode()), 48)
    train, valid = rows.split((0.7, 0.3))
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model, console = LlamaForCausalLM(config), Console()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    net = ed.EveryDepth(model, ed.end_to_end())
    how = {"optimizer": optimizer, "schedule": "constant", "batch_size": 16}
    ed.fit(net, train, steps=80, progress=False, **how)

    big = ed.insert(model, after=1).eval()
    ids = torch.tensor([list(b"The model")])
    console.print("same logits:", torch.equal(big(ids).logits, model.eval()(ids).logits))

    console.print(ed.growth.score(model, train, valid).table())
    for precondition in (False, True):
        jump = ed.growth.jumpboard(model, train, valid, precondition=precondition)
        console.print("preconditioned" if precondition else "plain gradient", str(jump))

    grown = ed.grow(model, train, valid, steps=30, rounds=1, optimizer=optimizer, batch_size=16)
    console.print(str(grown))


if __name__ == "__main__":
    main()
