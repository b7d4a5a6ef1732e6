"""A pretrained post-norm encoder made usable at every depth, in the CPU seconds of one another.

    python benchmarks/encoder.py [--steps 160] [--run runs/encoder]
    python benchmarks/encoder.py --collect

all-MiniLM-L6-v2 (`minilm` of EVERYDEPTH_DATA, as its authors saved it: BERT, 6 blocks) on 6,400
sentences of SST-2, a new classifier. Its first token reads the words in the last block only (in
blocks 2 to 5 it gives 93 to 98 % of its attention to itself), so below it its states hardly differ
between sentences: a pooler shared by all depths has little to read there. "balconies": tuned end to
end, then frozen, and at every depth a copy of the last block learns to say what the last depth
says, for a quarter of the steps. "lpa": a loss at every depth from the start, for as many CPU
seconds as both together. In bfloat16 if the CPU has instructions for it. Accuracy of every depth on
the 872 sentences of the test split. An arm that is done is not repeated; figures go to
benchmarks/results/encoder.json.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from record import SMOKE, record_times, sized
from torch import Tensor
from transformers import AutoModelForSequenceClassification, BertConfig
from transformers import BertForSequenceClassification as Bert

import everydepth as ed
from everydepth.data import Texts, load
from everydepth.environment import DATA_VARIABLE, fast_precision
from everydepth.exits.load import load_tokenizer, quiet_transformers

NAME, ROWS, LR, BALCONY_LR = "minilm", 32, 1e-4, 3e-4
LENGTH, SENTENCES = 64, 6400
PRECISION = "fp32" if SMOKE else fast_precision()
ARMS = ("balconies", "lpa")


def published(seed: int) -> Any:
    """With a classifier that knows nothing yet."""
    torch.manual_seed(seed)
    if SMOKE:
        sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32}
        return Bert(BertConfig(vocab_size=99, num_hidden_layers=3, num_attention_heads=2, **sizes))
    folder = Path(os.environ.get(DATA_VARIABLE, "")) / NAME
    with quiet_transformers():
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)


def sentences(split: str) -> list[dict[str, Tensor]]:
    """One row each, not padded."""
    if SMOKE:
        rows = torch.randint(5, 99, (40, 6), generator=torch.Generator().manual_seed(0))
        return [{"input_ids": row, "labels": row[0] % 2} for row in rows]
    found = load("sst2", kind=Texts, split=split)
    if split == "train":
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
        found = found.subset(order[:SENTENCES].tolist())
    tokenizer: Any = load_tokenizer(Path(os.environ[DATA_VARIABLE]) / NAME)
    ids = tokenizer(list(found.texts), truncation=True, max_length=LENGTH)["input_ids"]
    labels = torch.as_tensor(found.labels)
    return [
        {"input_ids": torch.tensor(row), "labels": label}
        for row, label in zip(ids, labels, strict=True)
    ]


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = [row["input_ids"] for row in rows]
    whole = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    lengths = torch.tensor([len(row) for row in ids])
    mask = (torch.arange(whole.shape[1]) < lengths[:, None]).long()
    labels = torch.stack([row["labels"] for row in rows])
    return {"input_ids": whole, "attention_mask": mask, "labels": labels}


def batches(rows: list[dict[str, Tensor]], steps: int, seed: int) -> list[dict[str, Tensor]]:
    """Sentences of about one length together: padding costs as much as words."""
    generator = torch.Generator().manual_seed(seed)
    found: list[dict[str, Tensor]] = []
    while len(found) < steps:
        order = torch.randperm(len(rows), generator=generator)[: 50 * ROWS].tolist()
        order.sort(key=lambda i: len(rows[i]["input_ids"]))
        groups = [order[at : at + ROWS] for at in range(0, len(order), ROWS)]
        mixed = torch.randperm(len(groups), generator=generator).tolist()
        found += [padded([rows[i] for i in groups[at]]) for at in mixed]
    return found[:steps]


@torch.no_grad()
def accuracy(net: Any, test: list[dict[str, Tensor]]) -> list[float]:
    """Of the depths 1..L."""
    stream = ed.as_stream(net)
    right = torch.zeros(stream.depth)
    for at in range(0, len(test), 109):
        batch = padded(test[at : at + 109])
        states = stream.observe(batch)
        for depth in range(1, stream.depth + 1):
            said = states.logits(depth).argmax(-1)
            right[depth - 1] += (said == batch["labels"]).sum()
    return (right / len(test)).tolist()


def tuned(net: Any, data: list[dict[str, Tensor]], lr: float) -> float:
    """CPU seconds of one step for each of the batches."""
    begin = time.process_time()
    ed.fit(
        net,
        data,
        steps=len(data),
        lr=lr,
        warmup=0.1,
        clip=1.0,
        shuffle=False,
        precision=PRECISION,
        progress=False,
    )
    net.eval()
    return time.process_time() - begin


def arm(name: str, steps: int, seed: int, seconds: float | None) -> dict[str, Any]:
    """One way, and the accuracy of every depth. seconds: what it may take, in place of steps."""
    train, test = sentences("train"), sentences("test")
    model = published(seed)
    labels = torch.stack([row["labels"] for row in test]).float()
    found: dict[str, Any] = {"majority": max(labels.mean().item(), 1 - labels.mean().item())}
    if name == "balconies":
        spent = tuned(ed.EveryDepth(model, ed.end_to_end()), batches(train, steps, seed), LR)
        model.eval()
        found["before"] = accuracy(model, test)
        net = ed.balcony(model, range(1, ed.as_stream(model).depth))
        rows = batches(train, steps // 4, seed + 1000)
        spent += tuned(net, [_unlabeled(batch) for batch in rows], BALCONY_LR)
    else:
        net = ed.EveryDepth(model, ed.lpa())
        if seconds is not None:
            probe = ed.EveryDepth(published(seed), ed.lpa())
            steps = max(2, int(10 * seconds / tuned(probe, batches(train, 10, seed), LR)))
        spent = tuned(net, batches(train, steps, seed), LR)
    how = {"steps": steps, "precision": PRECISION, "cpu_seconds": spent}
    return {**found, **how, "accuracy": accuracy(net, test)}


def _unlabeled(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=sized(160, 8))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--run", default=None if SMOKE else "runs/encoder")
    parser.add_argument("--collect", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for seed in range(given.seeds):
        seconds: float | None = None
        for name in ARMS:
            # The second arm has the seconds of the first.
            cell: dict[str, Any] = {
                "name": name,
                "steps": given.steps,
                "seed": seed,
                "seconds": seconds,
            }
            folder = None if given.run is None else Path(given.run) / f"{name}-{seed}"
            how: dict[str, Any] = {"dry_run": given.collect, "progress": False}
            done = (
                [arm(**cell)] if folder is None else ed.sweep([cell], arm, run=folder, **how).rows()
            )
            if not done:
                continue
            kept = ("majority", "before", "steps", "precision", "cpu_seconds", "accuracy")
            row = {key: done[0][key] for key in kept if key in done[0]}
            rows.append({"name": name, "seed": seed, **row})
            seconds = rows[-1]["cpu_seconds"]
            print(rows[-1], flush=True)
    settings = {"model": NAME, "data": "sst2", "rows": ROWS, "lr": LR, "balcony_lr": BALCONY_LR}
    record_times("encoder", {**settings, "arms": rows})


if __name__ == "__main__":
    main()
