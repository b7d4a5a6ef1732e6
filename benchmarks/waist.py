"""What following a stream costs: observe and drive against the plain forward, ratios in one run.

    python benchmarks/waist.py

Interleaved, one compute thread, CPU seconds of this process (which other work on the machine
disturbs less than wall-clock time), best of many. Written to benchmarks/results/waist.json.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
from record import no_options, record, sized
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

import everydepth as ed

ROUNDS, LIMIT = sized(40, 1), 1.05


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    config = ViTConfig(
        image_size=32,
        patch_size=4,
        hidden_size=sized(192, 24),
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=sized(768, 32),
        num_labels=10,
    )
    return ViTForImageClassification(config), {"pixel_values": torch.randn(8, 3, 32, 32)}


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    config = LlamaConfig(
        hidden_size=sized(256, 32),
        num_hidden_layers=8,
        num_attention_heads=8,
        intermediate_size=sized(688, 32),
        vocab_size=8000,
        use_cache=False,
    )
    return LlamaForCausalLM(config), {"input_ids": torch.randint(0, 8000, (4, 64))}


@torch.no_grad()
def measure(model: nn.Module, batch: dict[str, Tensor], name: str) -> dict[str, float]:
    model.eval()
    stream = ed.as_stream(model)
    ways: dict[str, Callable[[], object]] = {
        "plain": lambda: model(**batch),
        "observe": lambda: stream.observe(batch),
        "drive": lambda: stream.logits(stream.advance(stream.start(batch))),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in track(range(ROUNDS), description=name):
        for way, run in ways.items():
            gc.collect()
            begin = time.process_time()
            run()
            best[way] = min(best[way], time.process_time() - begin)
    return best


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    table = Table(title=f"Cost relative to the plain forward (at most {LIMIT} wanted)")
    for column in ("model", "plain ms", "observe", "drive"):
        table.add_column(column, justify="right")
    for name, build in {"ViT 12 x 192": vit, "Llama 8 x 256": llama}.items():
        best = measure(*build(), name)
        ratios = {way: best[way] / best["plain"] for way in ("observe", "drive")}
        results[name] = {"plain_ms": 1e3 * best["plain"], **ratios}
        table.add_row(name, f"{1e3 * best['plain']:.1f}", *(f"{r:.3f}" for r in ratios.values()))
    Console().print(table)
    record("waist", {"rounds": ROUNDS, "threads": 1, "wanted": LIMIT, "ratios": results})


if __name__ == "__main__":
    no_options()
    main()
