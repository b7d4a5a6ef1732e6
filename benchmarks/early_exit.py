"""Batched early exit: measured speed-up next to the one that layers promise.

    python benchmarks/early_exit.py [--models vit resnet56 minilm]

Batch 64, random weights: a ViT of 12 blocks (width 384, 197 tokens), ResNet-56 for images of 32 x
32 (27 blocks), and a BERT of MiniLM's size (6 blocks, width 384, 64 tokens). Rows may leave at the
depths that `calibrate(clock=True)` would test, by what blocks and readouts cost. Thresholds are
quantiles of the confidences there, so that the same number of rows leaves at each of them. Rounds
alternate between the full model and the policy; the ratio of their best CPU times is compared with
the layer-count speed-up, with the blocks counted by what each takes (those of a ResNet's first
stage take twice as long as those of the last), and with the one that was predicted. Target: at
least 0.9 of what the blocks left out took, which is what leaving could save.
The variant "batch waits" is what most libraries do: the whole batch goes on until its last row is
done. Each model is recorded beside those measured before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from record import by_cpu_time, record_times, recorded_times, sized
from rich.console import Console
from rich.table import Table
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig
from everydepth.exits.calibrate import observe
from everydepth.exits.clock import ExitClock
from everydepth.exits.policies import NEVER, Confidence, exit_depths, layer_speedup
from everydepth.exits.predict import predict
from everydepth.stream import as_stream

TARGET = 0.9


def vit(batch: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    width = sized(384, 64)
    config = ViTConfig(
        hidden_size=width, num_attention_heads=width // 64, intermediate_size=4 * width,
        num_labels=1000,
    )  # fmt: skip
    return ViTForImageClassification(config), {"pixel_values": torch.randn(batch, 3, 224, 224)}


def resnet56(batch: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = CifarResNetConfig.of_depth(sized(56, 20), shortcut="pad", num_labels=10)
    return CifarResNet(config), {"pixel_values": torch.randn(batch, 3, 32, 32)}


def minilm(batch: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    width = sized(384, 48)
    config = BertConfig(
        hidden_size=width, num_attention_heads=12, num_hidden_layers=6, intermediate_size=4 * width,
        vocab_size=1000,
    )  # fmt: skip
    ids = torch.randint(0, 1000, (batch, sized(64, 8)))
    return BertForSequenceClassification(config), {"input_ids": ids}


MODELS = {"vit": vit, "resnet56": resnet56, "minilm": minilm}


def even_policy(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], tested: Sequence[int]
) -> Confidence:
    """At each tested depth the same share of all rows is above the threshold."""
    certainty = observe(as_stream(model), batch, Confidence, batch_size=16).certainty
    rows, places = certainty.shape
    left = torch.arange(rows)
    thresholds: list[float] = []
    for depth in range(1, places + 1):
        if depth not in tested:
            thresholds.append(NEVER)
            continue
        found = certainty[left, depth - 1].sort(descending=True).values
        going = round(len(left) / sum(other >= depth for other in tested))
        # Between two rows, so that the last bits decide nothing.
        below = found[going] if going < len(found) else 0.0
        thresholds.append(float(found[going - 1] + below) / 2 if going else 1.0)
        left = left[certainty[left, depth - 1] < thresholds[-1]]
    return Confidence(threshold=tuple(thresholds))


@torch.no_grad()
def batch_waits(model: torch.nn.Module, batch: dict[str, torch.Tensor], policy: Confidence) -> None:
    stream = as_stream(model)
    cursor = stream.start(batch)
    waiting = torch.ones(cursor.batch_size, dtype=torch.bool)
    for threshold in policy.for_stream(stream):
        cursor = stream.step(cursor)
        if threshold == NEVER:
            continue
        waiting &= policy.certainty(stream.logits(cursor), ())[0] < threshold
        if not waiting.any():
            return
    stream.logits(stream.step(cursor))


def best_times(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            start = time.process_time()
            run()
            times[name].append(max(time.process_time() - start, 1e-9))
    return times


def measured(name: str, rows: int, rounds: int, console: Console) -> dict[str, Any]:
    torch.manual_seed(0)
    model, batch = MODELS[name](rows)
    stream = as_stream(model.eval())
    with torch.no_grad(), by_cpu_time():
        clock = ExitClock.measured(stream, batch)
    policy = even_policy(model, batch, clock.tested())
    prediction = predict(model, batch, policy=policy)
    outcomes = observe(stream, batch, Confidence, batch_size=16)
    expected = exit_depths(outcomes.certainty, torch.tensor(policy.for_stream(stream)))
    same = float((prediction.depths == expected).double().mean())
    assert same >= 1 - 1 / rows, "batched exits differ from the plain ones"
    layers = layer_speedup(prediction.depths, stream.depth)
    predicted = clock.speedup(prediction.depths, clock.tested())
    by_time = clock.block_speedup(prediction.depths)

    @torch.no_grad()
    def full() -> None:
        model(**batch)

    times = best_times(
        {
            "full model": full,
            "everydepth": lambda: predict(model, batch, policy=policy),
            "batch waits": lambda: batch_waits(model, batch, policy),
        },
        rounds,
    )
    best = {way: min(values) for way, values in times.items()}
    table = Table("", "best (s)", "speed-up", "of counted blocks", "of their time", title=name)
    for way, value in best.items():
        ratio = best["full model"] / value
        shares = [f"{ratio / counted:.2f}" for counted in (layers, by_time)]
        table.add_row(way, f"{value:.2f}", f"{ratio:.2f}", *shares)
    found = best["full model"] / best["everydepth"]
    console.print(
        f"mean exit {prediction.depths.double().mean():.2f} of {stream.depth}, tested at "
        f"{clock.tested()}; layer-count {layers:.2f}, by the time of blocks {by_time:.2f}, "
        f"predicted {predicted:.2f}"
    )
    console.print(table)
    return {
        "batch": rows,
        "tested": clock.tested(),
        "mean_exit": float(prediction.depths.double().mean()),
        "layer_speedup": layers,
        "block_time_speedup": by_time,
        "predicted_speedup": predicted,
        "measured_speedup": found,
        "share_of_layers": found / layers,
        "share_of_block_time": found / by_time,
        "holds": found / by_time >= TARGET,
        "cpu_seconds": times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=sized(5, 1))
    parser.add_argument("--batch", type=int, default=sized(64, 12))
    arguments = parser.parse_args()
    models: dict[str, Any] = recorded_times("early_exit").get("models", {})
    for name in arguments.models:
        models[name] = measured(name, arguments.batch, arguments.rounds, Console())
        record_times("early_exit", {"target": TARGET, "models": models})


if __name__ == "__main__":
    main()
