"""A tiny GPT-2 learns what a sentence is about, wrong labels included (Residual Relay, 4.4)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import everydepth as ed
from everydepth.ablations import label_prompts
from everydepth.data import flip_labels
from everydepth.training import UntilAccuracy

TOPICS = {"food": "bread soup apple dinner", "sport": "ball race team goal", "sea": "wave ship"}
OTHERS = ["the", "topic", "is", "about", "we", "saw", "a", "and", "then"]
WORDS = [*(w for t in TOPICS for w in (t, *TOPICS[t].split())), *OTHERS]


def tokenizer(texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
    return {"input_ids": [[WORDS.index(w) + 1 for w in t.lower().split()] for t in texts]}


def sentences(count: int, seed: int) -> tuple[list[str], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, len(TOPICS), (count,), generator=generator)
    texts: list[str] = []
    for label in labels.tolist():
        words = list(TOPICS.values())[label].split()
        picks = torch.randint(0, len(words), (3,), generator=generator).tolist()
        texts.append(f"we saw a {words[picks[0]]} and a {words[picks[1]]} then {words[picks[2]]}")
    return texts, labels


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    texts, labels = sentences(60, 1)
    noise = flip_labels(labels, 0.1, classes=len(TOPICS))
    noisy = label_prompts(texts, noise.labels, list(TOPICS), tokenizer, 24)
    clean = label_prompts(*sentences(60, 2), list(TOPICS), tokenizer, 24)
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 24}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS) + 1, **sizes, **dropout, **ends))
    net = ed.EveryDepth(model, ed.end_to_end())
    until = UntilAccuracy(noisy)
    ed.fit(net, noisy, epochs=40, batch_size=20, lr=3e-3, schedule="constant", callbacks=[until])
    print(f"all training labels written: {'yes' if until.reached else 'not reached'}")
    print(ed.memorization(model, noisy, clean, flipped=noise))
    print(ed.ablate(model, clean, c=(0.0, 0.5, 1.0)).table("accuracy"))


if __name__ == "__main__":
    main()
