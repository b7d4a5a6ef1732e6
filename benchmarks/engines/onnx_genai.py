"""Depths of a language model in onnxruntime-genai: key/value cache, same tokens, speed beside ours.

    python benchmarks/engines/onnx_genai.py FOLDER [--depths 2,4,6] [--precisions fp32,int4]
        [--environment PATH]

FOLDER: a causal language model with its tokenizer. Each depth is exported as a stock checkpoint,
which the engine's own builder turns into a graph with a cache. The engine (onnxruntime-genai 0.18,
1.3 GB with what its builder needs) goes into an environment of its own at PATH, or a temporary one.
One thread each; best of three rounds, in CPU seconds. int4: weights in four bits, so
the text may become another one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from environment import asked, interpreter
from record import record
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import everydepth as ed

PACKAGES = ("onnxruntime-genai==0.18.0", "torch==2.13.0", "transformers==5.22.2", "onnx", "onnx-ir")
PROMPT, NEW = "Once upon a time", 96


def ours(model: Any, ids: list[int], depth: int) -> tuple[list[int], float]:
    """Tokens, and how many a CPU second, decoded by everydepth in PyTorch."""
    best, tokens = 0.0, list[int]()
    for _ in range(3):
        began = time.process_time()
        tokens = list(ed.generate(model, [ids], depth=depth, max_new_tokens=NEW).tokens[0])
        best = max(best, len(tokens) / (time.process_time() - began))
    return tokens, best


def shared(one: list[int], other: list[int]) -> int:
    """How many tokens two texts have in common before they part."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--depths", default="2,4,6")
    parser.add_argument("--precisions", default="fp32,int4")
    parser.add_argument("--environment", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    model: Any = AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(given.folder)
    ids = list(tokenizer.encode(PROMPT))
    rows: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        python = interpreter(given.environment or scratch / "environment", PACKAGES)
        for depth in map(int, given.depths.split(",")):
            source = ed.export(model, scratch / f"hf{depth}", depth=depth, tokenizer=tokenizer)
            mine, speed = ours(model, ids, depth)
            for precision in given.precisions.split(","):
                folder = scratch / f"{precision}-{depth}"
                build = [python, "-m", "onnxruntime_genai.models.builder", "-e", "cpu"]
                build += ["-i", str(source), "-o", str(folder), "-p", precision]
                subprocess.run([*build, "-c", name], check=True, capture_output=True)
                question = {"folder": str(folder), "prompt": ids, "new": NEW}
                found = asked(python, "genai_worker.py", question)
                versions = found["versions"]
                rows.append(
                    {
                        "depth": depth,
                        "precision": precision,
                        "bytes": sum(f.stat().st_size for f in folder.glob("model.onnx*")),
                        "tokens": len(mine),
                        "same tokens": shared(mine, found["tokens"]),
                        "tokens a second": round(found["tokens a second"], 1),
                        "tokens a second, ours": round(speed, 1),
                    }
                )
                console.print(rows[-1])
    figures = {"date": date.today().isoformat(), "model": given.folder.name, "versions": versions}
    console.print(record("onnx_genai", figures | {"rows": rows}))


if __name__ == "__main__":
    main()
