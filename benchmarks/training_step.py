"""What a training step on every depth costs, against end-to-end with a plain loss.

    python benchmarks/training_step.py

A step is forward and backward; the optimizer would add the same to all. ViT, 12 blocks of width 192
and 10 classes: an LPA step against an end-to-end one. Llama, 8 blocks of width 256, vocabulary
16,000, 512 tokens: LPA on all depths, with one depth drawn a step, and with two of the last five,
against the arithmetic floor (trunk + readouts) / (trunk + 1 readout) in FLOPs; peak memory too.
Interleaved, one compute thread, CPU seconds, best of many. Written to
benchmarks/results/training_step.json.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from peak import peak_mb
from record import no_options, record_times, sized
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

import everydepth as ed

ROUNDS = sized(25, 1)
VOCABULARY = sized(16_000, 100)
WANTED = {"vit_lpa": 1.05, "llama_over_floor": 1.1, "llama_memory": 1.05}
Step = Callable[[], object]


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    config = ViTConfig(
        image_size=32,
        patch_size=4,
        hidden_size=sized(192, 24),
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=sized(768, 32),
        num_labels=10,
        hidden_dropout_prob=0.0,
    )
    labels = torch.randint(0, 10, (16,))
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(16, 3, 32, 32),
        "labels": labels,
    }


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    config = LlamaConfig(
        hidden_size=sized(256, 32),
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=sized(688, 32),
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    ids = torch.randint(0, VOCABULARY, (1, sized(512, 16)))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


BUILDS = {"vit": vit, "llama": llama}
OBJECTIVES = {
    "lpa": ed.lpa(),
    "sample=1": ed.lpa().sampled(1),
    "top=5, sample=2": ed.lpa(top=5).sampled(2),
    "chunked": ed.end_to_end(),
}


def step(way: str, model: nn.Module, batch: dict[str, Tensor]) -> Step:
    """Forward and backward: by the model's own loss in float32, or by ours."""
    if way == "plain":
        return lambda: model(**batch).loss.backward()
    net = ed.EveryDepth(model, OBJECTIVES[way]).train()
    return lambda: net(**batch).loss.backward()


def prepare(family: str, way: str) -> Step:
    torch.manual_seed(0)
    model, batch = BUILDS[family]()
    return step(way, model.train(), batch)


def seconds(family: str, ways: tuple[str, ...]) -> dict[str, float]:
    """Best CPU time of each way, all on one model, one after the other in every round."""
    torch.manual_seed(0)
    model, batch = BUILDS[family]()
    model.train()
    steps = {way: step(way, model, batch) for way in ways}
    best = dict.fromkeys(ways, float("inf"))
    for _ in track(range(ROUNDS), description=family):
        for way, run in steps.items():
            model.zero_grad()
            gc.collect()
            begin = time.process_time()
            run()
            best[way] = min(best[way], time.process_time() - begin)
    return best


def floors() -> dict[str, float]:
    """(trunk + readouts) / (trunk + 1 readout) of the Llama, in FLOPs of forward and backward."""
    model, batch = llama()
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    config: Any = model.config
    # Forward, gradient of the feature, gradient of the weight; 2 operations a multiplication.
    head = 3 * 2 * batch["input_ids"].numel() * config.hidden_size * config.vocab_size
    trunk = counter.get_total_flops() - head
    readouts = {"lpa": 8, "sample=1": 2, "top=5, sample=2": 3, "chunked": 1}
    return {way: (trunk + n * head) / (trunk + head) for way, n in readouts.items()}


def main() -> None:
    torch.set_num_threads(1)
    ways = ("plain", *OBJECTIVES)
    memory = {way: peak_mb(prepare, "llama", way) for way in ways}
    memory_vit = {way: peak_mb(prepare, "vit", way) for way in ways[:2]}
    best_vit, best, floor = seconds("vit", ways[:2]), seconds("llama", ways), floors()
    table = Table(title="A training step against end-to-end with a plain loss")
    for column in ("model", "objective", "time", "floor", "time / floor", "memory"):
        table.add_column(column, justify="right")
    vit_time, vit_memory = (
        best_vit["lpa"] / best_vit["plain"],
        memory_vit["lpa"] / memory_vit["plain"],
    )
    table.add_row("ViT 12 x 192", "lpa", f"{vit_time:.3f}", "", "", f"{vit_memory:.3f}")
    rows: dict[str, dict[str, float]] = {}
    for way in ways[1:]:
        ratio = best[way] / best["plain"]
        rows[way] = {
            "time": ratio,
            "floor": floor[way],
            "time_over_floor": ratio / floor[way],
            "memory": memory[way] / memory["plain"],
        }
        table.add_row("Llama 8 x 256", way, *(f"{value:.3f}" for value in rows[way].values()))
    Console().print(table)
    record_times(
        "training_step",
        {
            "rounds": ROUNDS,
            "threads": 1,
            "wanted": WANTED,
            "vit": {"plain_ms": 1e3 * best_vit["plain"], "lpa": vit_time, "memory": vit_memory},
            "llama": {"plain_ms": 1e3 * best["plain"], "plain_peak_mb": memory["plain"], **rows},
        },
    )


if __name__ == "__main__":
    no_options()
    main()
