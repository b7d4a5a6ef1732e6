"""Train one small ViT on real digits twice, and see which depths of it can be used.

End-to-end training makes a good model of the last depth only. Layer-wise progressive approximation
(LPA) gives every depth the same readout and a small part of the loss: one network, eight models.
"""

from __future__ import annotations

import time

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.optim.lr_scheduler import OneCycleLR
from transformers import ViTConfig, ViTForImageClassification

import everydepth as ed
from everydepth.data import batches, load_digits

DEPTH, EPOCHS, BATCH = 8, 30, 64
CONFIG = ViTConfig(
    image_size=8,
    patch_size=2,
    num_channels=1,
    num_labels=10,
    hidden_size=64,
    num_hidden_layers=DEPTH,
    num_attention_heads=4,
    intermediate_size=128,
)


def train(objective: ed.Objective, name: str, seed: int = 0) -> ViTForImageClassification:
    torch.manual_seed(seed)
    model = ViTForImageClassification(CONFIG)
    net = ed.EveryDepth(model, objective=objective)
    data = batches(load_digits("train"), BATCH, shuffle=True, seed=seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = OneCycleLR(optimizer, max_lr=2e-3, total_steps=EPOCHS * len(data))
    for _ in track(range(EPOCHS), description=f"{name:<12}"):
        for batch in data:
            net(**batch).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def accuracy_per_depth(model: ViTForImageClassification) -> list[float]:
    test = load_digits("test")
    states = ed.as_stream(model).observe(test.batch(range(len(test))))
    guesses = [states.logits(depth).argmax(-1) for depth in range(DEPTH + 1)]
    return [float((guess == test.labels).float().mean()) for guess in guesses]


def main() -> None:
    console, begin = Console(), time.perf_counter()
    # The tensors are small: more threads only wait for one another.
    torch.set_num_threads(1)
    end_to_end = accuracy_per_depth(train(ed.end_to_end(), "end-to-end"))
    model = train(ed.lpa(), "LPA")
    lpa = accuracy_per_depth(model)

    table = Table(title=f"Accuracy on {len(load_digits('test'))} held-out digits")
    for column in ("depth", "parameters", "end-to-end", "LPA"):
        table.add_column(column, justify="right")
    for depth in range(1, DEPTH + 1):
        small = ed.at_depth(model, depth, share=True)
        size = sum(p.numel() for p in small.parameters())
        table.add_row(str(depth), f"{size:,}", f"{end_to_end[depth]:.1%}", f"{lpa[depth]:.1%}")
    console.print(table)

    half = DEPTH // 2
    console.print(
        f"Half the blocks keep {lpa[half]:.1%} of the digits right (end-to-end training: "
        f"{end_to_end[half]:.1%}), with one head and one checkpoint.\n"
        f"`ed.at_depth(model, {half})` is a plain ViT with {half} blocks. "
        f"Trained and measured in {time.perf_counter() - begin:.0f} s."
    )


if __name__ == "__main__":
    main()
