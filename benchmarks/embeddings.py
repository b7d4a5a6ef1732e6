"""Sentence embeddings at every depth, beside AdaptiveLayerLoss of sentence-transformers.

    python benchmarks/embeddings.py FOLDER [--seconds 120]

FOLDER holds an encoder that sentence-transformers opens (all-MiniLM-L6-v2). Every arm tunes it on
the paraphrases of MRPC (EVERYDEPTH_DATA) for the same CPU seconds, in the same batches, at the same
rate. Measured on the test part, at every depth: how well the cosine of a pair tells paraphrases
from other pairs (area under the curve), and how often the nearest of all second sentences is the
one that belongs to the first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from record import SMOKE, record_times, sized
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import everydepth as ed
from everydepth.data import load
from everydepth.training import contrastive

PAIRS, LENGTH, RATE = sized(16, 4), sized(64, 16), 2e-5
TINY: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}

Pair = tuple[str, str]
Encode = Callable[[list[str]], dict[str, Tensor]]
Loss = Callable[[list[Pair]], Tensor]
Make = Callable[[Any, Encode, str | None], tuple[nn.Module, Loss]]
"""From an encoder: the model that is tuned, and its loss."""


def opened(folder: str | None) -> tuple[Any, Encode]:
    """The encoder, and its tokenizer cut to LENGTH."""
    if folder is None:
        torch.manual_seed(0)
        model = BertModel(BertConfig(vocab_size=200, num_attention_heads=2, **TINY))
        return model, lambda texts: {
            "input_ids": torch.tensor([[hash(t[:8]) % 190 + 5] * 4 for t in texts]),
            "attention_mask": torch.ones(len(texts), 4, dtype=torch.long),
        }
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    how: dict[str, Any] = {"padding": True, "truncation": True, "max_length": LENGTH}
    return AutoModel.from_pretrained(folder), lambda texts: dict(
        tokenizer(texts, return_tensors="pt", **how)
    )


def ours(objective: ed.Objective) -> Make:
    def make(model: Any, encode: Encode, _: str | None) -> tuple[nn.Module, Loss]:
        net = ed.EveryDepth(model, objective, criterion=contrastive(), task="embedding").train()

        def loss(pairs: list[Pair]) -> Tensor:
            groups = torch.arange(len(pairs)).repeat(2)
            texts = [a for a, _ in pairs] + [b for _, b in pairs]
            return net(**encode(texts), labels=groups).loss

        return model, loss

    return make


def adaptive(_: Any, __: Encode, folder: str | None) -> tuple[nn.Module, Loss]:
    """The peer, with the loss its own examples give it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.losses import AdaptiveLayerLoss, MultipleNegativesRankingLoss

    assert folder is not None
    peer = SentenceTransformer(folder, device="cpu")
    peer.max_seq_length = LENGTH
    found = AdaptiveLayerLoss(peer, MultipleNegativesRankingLoss(peer))
    peer.train()

    def loss(pairs: list[Pair]) -> Tensor:
        columns = [peer.tokenize([pair[side] for pair in pairs]) for side in (0, 1)]
        return found(columns, torch.zeros(len(pairs)))

    return cast(Any, peer[0]).auto_model, loss


ARMS: dict[str, Make | None] = {
    "published": None,
    "end_to_end": ours(ed.end_to_end()),
    "lpa": ours(ed.lpa()),
    "lpa+distilled": ours(ed.lpa().distilled()),
    "ladder+distilled": ours(ed.ladder().distilled()),
    "AdaptiveLayerLoss": adaptive,
}


def batches(pairs: list[Pair]) -> Iterator[list[Pair]]:
    draw = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(len(pairs), generator=draw).tolist()
        for start in range(0, len(order) - PAIRS + 1, PAIRS):
            yield [pairs[i] for i in order[start : start + PAIRS]]


def tuned(model: nn.Module, loss: Loss, pairs: list[Pair], seconds: float) -> int:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    start, steps = time.process_time(), 0
    for batch in batches(pairs):
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()
        steps += 1
        if time.process_time() - start > seconds:
            break
    return steps


@torch.no_grad()
def quality(model: Any, encode: Encode, pairs: list[Pair], labels: Tensor) -> dict[str, Any]:
    """By depth from 0."""
    stream = ed.as_stream(model.eval(), task="embedding")
    sides: list[list[Tensor]] = []
    for side in (0, 1):
        parts = [
            stream.observe(encode([pair[side] for pair in pairs[i : i + 64]]))
            for i in range(0, len(pairs), 64)
        ]
        sides.append(
            [
                nn.functional.normalize(torch.cat([s.logits(depth) for s in parts]), dim=-1)
                for depth in range(stream.depth + 1)
            ]
        )
    areas, nearest = [], []
    for a, b in zip(*sides, strict=True):
        areas.append(round(float(roc_auc_score(labels, (a * b).sum(1))), 4))
        same = labels == 1
        found = (a[same] @ b.T).argmax(1)
        nearest.append(round(float((found == same.nonzero()[:, 0]).float().mean()), 4))
    return {"area": areas, "nearest": nearest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", help="With --smoke it may be left out.")
    parser.add_argument("--seconds", type=float, default=sized(120.0, 0.1))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if SMOKE:
        train = [(f"{i} says a", f"{i} says b") for i in range(16)]
        test, labels = train, torch.tensor([1, 0] * 8)
    elif options.folder is None:
        parser.error("the folder of an encoder is needed")
    else:
        parts: dict[str, Any] = {name: load("mrpc", name) for name in ("train", "test")}
        every = {name: [(row["text"], row["text_pair"]) for row in p] for name, p in parts.items()}
        said = {n: torch.tensor([int(row["labels"]) for row in p]) for n, p in parts.items()}
        train = [pair for pair, same in zip(every["train"], said["train"], strict=True) if same]
        test, labels = every["test"], said["test"]
    found: dict[str, Any] = {}
    for name, make in ARMS.items():
        if SMOKE and make is adaptive:
            continue
        torch.manual_seed(0)
        model, encode = opened(options.folder)
        steps = 0
        if make is not None:
            model, loss = make(model, encode, options.folder)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            steps = tuned(model, loss, train, options.seconds)
            pairs = zip(before, model.parameters(), strict=True)
            assert not all(torch.equal(a, b) for a, b in pairs), f"{name} tuned nothing"
        found[name] = {"steps": steps, **quality(model, encode, test, labels)}
        print(f"{name:18s} {steps:5d} steps  {found[name]['nearest']}", flush=True)
    figures = {
        "model": "all-MiniLM-L6-v2",
        "data": f"MRPC: {len(train)} paraphrases to train on, {len(test)} pairs to test",
        "settings": {"pairs_a_batch": PAIRS, "tokens": LENGTH, "AdamW_lr": RATE, "seed": 0},
        "cpu_seconds_an_arm": options.seconds,
        "by_depth_from_0": found,
    }
    print(json.dumps(figures, indent=1))
    record_times("embeddings", figures)


if __name__ == "__main__":
    main()
