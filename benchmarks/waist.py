"""What a stream costs: observe, drive and discovery against the plain forward, in one run.

    python benchmarks/waist.py

Discovery, which happens once per model, is in forwards of the small batch it runs on; beside it,
how often it ran the blocks. Interleaved, one compute thread, CPU seconds of this process (which
other work on the machine disturbs less than wall-clock time), best of many. Written to
benchmarks/results, beside those of other processors.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
from record import no_options, record_times, sized
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
def discovery(build: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> dict[str, float]:
    """CPU seconds of discovery in forwards of its own batch, and how often the blocks ran."""
    best, plain, ran = float("inf"), float("inf"), 0
    for _ in range(sized(5, 1)):
        model = build()[0].eval()
        inside = next(m for m in model.modules() if isinstance(m, nn.Linear))
        seen: list[int] = []
        handle = inside.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        begin = time.process_time()
        stream = ed.as_stream(model)
        best = min(best, time.process_time() - begin)
        ran = len(seen)
        handle.remove()
        batch = stream.trial()
        assert batch is not None
        for _ in range(sized(10, 1)):
            begin = time.process_time()
            model(**batch)
            plain = min(plain, time.process_time() - begin)
    return {"discovery": best / plain, "discovery_ran_blocks": ran, "discovery_ms": 1e3 * best}


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
    for column in ("model", "plain ms", "observe", "drive", "discovery, in forwards", "ms"):
        table.add_column(column, justify="right")
    for name, build in {"ViT 12 x 192": vit, "Llama 8 x 256": llama}.items():
        best = measure(*build(), name)
        ratios = {way: best[way] / best["plain"] for way in ("observe", "drive")}
        once = discovery(build)
        results[name] = {"plain_ms": 1e3 * best["plain"], **ratios, **once}
        shown = (f"{best['plain'] * 1e3:.1f}", *(f"{ratio:.3f}" for ratio in ratios.values()))
        table.add_row(name, *shown, f"{once['discovery']:.1f}", f"{once['discovery_ms']:.0f}")
    Console().print(table)
    record_times("waist", {"rounds": ROUNDS, "threads": 1, "wanted": LIMIT, "ratios": results})


if __name__ == "__main__":
    no_options()
    main()
