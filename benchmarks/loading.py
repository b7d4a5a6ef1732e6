"""Loading a depth of a checkpoint: bytes read and memory, next to what the whole model takes.

    python benchmarks/loading.py

A Llama of 24 blocks (width 512, vocabulary 8,000, 415 MB). Each case runs in a process of its own:
it imports everything, loads, and runs one token through the model, so that every weight has been
used. "Read" is what the kernel fetched from the disk for the process (the file is dropped from the
cache before); "peak" is the highest resident memory above that before loading. Target: both at most
1.15 times k/24 of the blocks plus embedding and head.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import record_times, sized
from rich.console import Console
from rich.table import Table

BLOCKS = sized(24, 2)


def write_checkpoint(folder: Path) -> dict[str, int]:
    """Save the model; the bytes of one block, and of all that is not a block."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=sized(512, 16),
        num_hidden_layers=BLOCKS,
        num_attention_heads=8,
        intermediate_size=sized(2048, 16),
        vocab_size=sized(8000, 50),
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    block = sum(p.numel() * p.element_size() for p in model.model.layers[0].parameters())
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"block": block, "rest": whole - BLOCKS * block}


def measure(folder: Path, depth: int) -> dict[str, float]:
    """Run in a fresh process: load a depth and use it."""
    import psutil
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from everydepth.exits import load

    def use(model: Any) -> None:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long))

    tiny = LlamaConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
        vocab_size=8,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as small:
        # Everything that is imported or built once.
        LlamaForCausalLM(tiny).save_pretrained(small)
        use(load(small, depth=1))
    file = folder / "model.safetensors"
    handle = os.open(file, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
    process = psutil.Process()
    before, read = process.memory_info().rss, process.io_counters().read_bytes
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    start = time.perf_counter()
    model = load(folder, depth=depth)
    loaded = time.perf_counter()
    use(model)
    used = time.perf_counter()
    status = Path("/proc/self/status").read_text()
    peak = 1024 * int(status.split("VmHWM:")[1].split()[0])
    return {
        "peak_bytes": peak - before,
        "read_bytes": process.io_counters().read_bytes - read,
        "load_seconds": loaded - start,
        "first_use_seconds": used - loaded,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "DEPTH"), help="used by itself")
    arguments = parser.parse_args()
    if arguments.measure:
        folder, depth = arguments.measure
        print(json.dumps(measure(Path(folder), int(depth))))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as name:
        sizes = write_checkpoint(Path(name))
        for depth in sized((1, 2, 4, 6, 12, 18, 24), (1,)):
            done = subprocess.run(
                [sys.executable, __file__, "--measure", name, str(depth)],
                capture_output=True,
                text=True,
                check=True,
            )
            found = json.loads(done.stdout.splitlines()[-1])
            needed = depth * sizes["block"] + sizes["rest"]
            rows.append(
                {
                    "depth": depth,
                    "needed_bytes": needed,
                    **found,
                    "peak_ratio": found["peak_bytes"] / needed,
                    "read_ratio": found["read_bytes"] / needed,
                }
            )
    table = Table("depth", "needed", "read", "ratio", "peak memory", "ratio", "load", "first use")
    for row in rows:
        table.add_row(
            str(row["depth"]),
            f"{row['needed_bytes'] / 1e6:.0f} MB",
            f"{row['read_bytes'] / 1e6:.0f} MB",
            f"{row['read_ratio']:.2f}",
            f"{row['peak_bytes'] / 1e6:.0f} MB",
            f"{row['peak_ratio']:.2f}",
            f"{row['load_seconds']:.2f} s",
            f"{row['first_use_seconds']:.2f} s",
        )
    Console().print(table)
    worst = max(max(row["peak_ratio"], row["read_ratio"]) for row in rows)
    result = {
        "blocks": BLOCKS,
        **sizes,
        "rows": rows,
        "target": 1.15,
        "worst_ratio": worst,
        "holds": worst <= 1.15,
    }
    record_times("loading", result)


if __name__ == "__main__":
    main()
