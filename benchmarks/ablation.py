"""What an ablation costs: the shared sweep against full passes, gradient norms against a step.

python benchmarks/ablation.py

Ratios within one run, interleaved, best of several; random weights, a ViT of 12 blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from record import no_options, record_times, sized
from torch.nn import functional as F  # noqa: N812
from transformers import ViTConfig, ViTForImageClassification

import everydepth as ed
from everydepth.ablations import tapped
from everydepth.ablations.config import SCALES

ROWS, ROUNDS = sized((32, 3), (2, 1))


def model() -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=32,
        patch_size=8,
        num_labels=10,
        hidden_size=sized(192, 24),
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=sized(768, 32),
    )
    return ViTForImageClassification(config).eval()


def best(rounds: int, **tasks: Callable[[], Any]) -> dict[str, float]:
    """Seconds of CPU of each task, the best of interleaved rounds."""
    found = dict.fromkeys(tasks, float("inf"))
    for _ in range(rounds):
        for name, task in tasks.items():
            begin = time.process_time()
            task()
            found[name] = min(found[name], time.process_time() - begin)
    return found


def main() -> None:
    torch.set_num_threads(1)
    network = model()
    batch = {
        "pixel_values": torch.randn(ROWS, 3, 32, 32),
        "labels": torch.randint(0, 10, (ROWS,)),
    }
    stream = ed.as_stream(network)

    @torch.no_grad()
    def naive() -> None:
        for layer in range(1, 13):
            for c in SCALES:
                with ed.scaled_skip(stream, layer=layer, c=c):
                    network(pixel_values=batch["pixel_values"])

    def shared() -> None:
        ed.ablate(stream, batch, progress=False)

    def step() -> None:
        logits = network(pixel_values=batch["pixel_values"]).logits
        F.cross_entropy(logits, batch["labels"]).backward()
        network.zero_grad()

    sweep = best(ROUNDS, naive=naive, shared=shared)
    gradients = best(
        10 * ROUNDS,
        step=step,
        norms=lambda: tapped(stream, batch, statistics=False),
        norms_and_statistics=lambda: tapped(stream, batch),
    )
    figures = {
        "sweep": {**sweep, "ratio": sweep["shared"] / sweep["naive"], "target": 0.6},
        "gradient_norms": {
            **gradients,
            "ratio": gradients["norms"] / gradients["step"],
            "ratio_with_statistics": gradients["norms_and_statistics"] / gradients["step"],
            "target": 1.3,
        },
    }
    for name, values in figures.items():
        print(name, {k: round(v, 3) for k, v in values.items()})
    record_times(
        "ablation", {"setting": {"blocks": 12, "scales": list(SCALES), "rows": ROWS}, **figures}
    )


if __name__ == "__main__":
    no_options()
    main()
