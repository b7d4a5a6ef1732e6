"""Batched early exit: measured speed-up next to the one that layers promise.

    python benchmarks/early_exit.py

A ViT of 12 blocks (width 384, 197 tokens, random weights), batch 64. Thresholds are quantiles of
the confidences at each depth, so that the same number of rows leaves at each of the depths 1 to 11
and the mean exit is half the depth. Rounds alternate between the full model and the policy; the
ratio of their best times is compared with the layer-count speed-up. Target: at least 0.9 of it.
The variant "batch waits" is what most libraries do: the whole batch goes on until its last row is
done.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from record import record, sized
from rich.console import Console
from rich.table import Table
from transformers import ViTConfig, ViTForImageClassification

from everydepth.exits.calibrate import observe
from everydepth.exits.policies import Confidence, exit_depths, layer_speedup
from everydepth.exits.predict import predict
from everydepth.stream import as_stream


def half_depth_policy(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Confidence:
    """At depth l, 1/(L-l) of the rows still there are above the threshold."""
    outcomes = observe(as_stream(model), batch, Confidence, batch_size=16)
    certainty = outcomes.certainty
    rows, places = certainty.shape
    left = torch.arange(rows)
    thresholds: list[float] = []
    for place in range(places):
        found = certainty[left, place].sort(descending=True).values
        going = round(len(left) / (places - place))
        # Between two rows, so that the last bits decide nothing.
        below = found[going] if going < len(found) else 0.0
        thresholds.append(float(found[going - 1] + below) / 2 if going else 1.0)
        left = left[certainty[left, place] < thresholds[-1]]
    return Confidence(threshold=tuple(thresholds))


@torch.no_grad()
def batch_waits(model: torch.nn.Module, batch: dict[str, torch.Tensor], policy: Confidence) -> None:
    stream = as_stream(model)
    cursor = stream.start(batch)
    waiting = torch.ones(cursor.batch_size, dtype=torch.bool)
    for threshold in policy.for_stream(stream):
        cursor = stream.step(cursor)
        waiting &= policy.certainty(stream.logits(cursor), ())[0] < threshold
        if not waiting.any():
            return
    stream.logits(stream.step(cursor))


def best_times(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=sized(5, 1))
    parser.add_argument("--batch", type=int, default=sized(64, 12))
    parser.add_argument("--width", type=int, default=sized(384, 64))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    width = arguments.width
    config = ViTConfig(
        hidden_size=width, num_attention_heads=width // 64, intermediate_size=4 * width,
        num_labels=1000,
    )  # fmt: skip
    model = ViTForImageClassification(config).eval()
    batch = {"pixel_values": torch.randn(arguments.batch, 3, 224, 224)}
    policy = half_depth_policy(model, batch)
    prediction = predict(model, batch, policy=policy)
    outcomes = observe(as_stream(model), batch, Confidence, batch_size=16)
    expected = exit_depths(outcomes.certainty, torch.tensor(policy.for_stream(as_stream(model))))
    assert torch.equal(prediction.depths, expected), "batched exits differ from the plain ones"
    layers = layer_speedup(prediction.depths, 12)

    @torch.no_grad()
    def full() -> None:
        model(**batch)

    times = best_times(
        {
            "full model": full,
            "everydepth": lambda: predict(model, batch, policy=policy),
            "batch waits": lambda: batch_waits(model, batch, policy),
        },
        arguments.rounds,
    )
    best = {name: min(values) for name, values in times.items()}
    table = Table("", "best (s)", "speed-up", "share of the layer-count speed-up")
    for name, value in best.items():
        ratio = best["full model"] / value
        table.add_row(name, f"{value:.2f}", f"{ratio:.2f}", f"{ratio / layers:.2f}")
    measured = best["full model"] / best["everydepth"]
    console = Console()
    console.print(
        f"mean exit {prediction.depths.double().mean():.2f} of 12, layer-count {layers:.2f}"
    )
    console.print(table)
    result = {
        "model": f"ViT, 12 blocks, width {width}, 197 tokens",
        "batch": arguments.batch,
        "mean_exit": float(prediction.depths.double().mean()),
        "layer_speedup": layers,
        "measured_speedup": measured,
        "share": measured / layers,
        "target": 0.9,
        "holds": measured / layers >= 0.9,
        "seconds": times,
    }
    record("early_exit", result)


if __name__ == "__main__":
    main()
