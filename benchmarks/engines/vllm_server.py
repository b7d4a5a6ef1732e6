"""`everydepth serve --engine vllm`: rungs of a model in stock vLLM servers, behind our routes.

    python benchmarks/engines/vllm_server.py MODEL [--rungs 3,6] [--environment PATH]

vLLM goes into an environment of its own, as in vllm.py. The server is started as a user would,
asked through OpenAI's interface at every rung, streaming and not, and ended; what is left of its
processes is counted. One thread, greedy.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
import psutil
import torch
from environment import interpreter
from record import record
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import PACKAGES, VARIABLES, WITHOUT

import everydepth as ed
from serving import PROMPTS, free_port, started

NEW = 24
SETTINGS = VARIABLES | {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def asked(url: str, rung: int, prompt: str, ids: list[int]) -> dict[str, Any]:
    """What one request got: its tokens, depth and seconds; and the same as a stream."""
    body = {"model": f"m@{rung}", "prompt": ids, "max_tokens": NEW, "return_token_ids": True}
    begin = time.perf_counter()
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status()
    (choice,) = answer.json()["choices"]
    found = {"tokens": choice["token_ids"], "depth": choice["depth"]}
    found["seconds"] = time.perf_counter() - begin
    streamed = httpx.post(f"{url}/v1/completions", json=body | {"stream": True}, timeout=600)
    found["events"] = streamed.text.count("data: {")
    return found | {"prompt": prompt}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rungs", default="3,6")
    parser.add_argument("--environment", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= SETTINGS
    rungs = [int(rung) for rung in given.rungs.split(",")]
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(given.model)
    with tempfile.TemporaryDirectory() as name:
        place = given.environment or Path(name) / "environment"
        python = interpreter(place, PACKAGES, WITHOUT)
        folder, port = Path(name) / "model", free_port()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        command = [sys.executable, "-m", "everydepth", "serve", str(folder), "--name", "m"]
        command += ["--engine", "vllm", "--rungs", given.rungs, "--vllm", python]
        begin = time.perf_counter()
        with started([*command, "--port", str(port)], port, "m", patience=1800) as server:
            figures: dict[str, Any] = {"seconds to start": time.perf_counter() - begin}
            family = server.process.children(recursive=True)
            for rung in rungs:
                for prompt in PROMPTS[:2]:
                    ids = list(tokenizer(prompt)["input_ids"])
                    found = asked(server.url, rung, prompt, ids)
                    alone = ed.generate(model, ids, max_new_tokens=NEW, depth=rung).tokens[0]
                    pairs = zip(found["tokens"], alone, strict=False)
                    found["same tokens"] = sum(a == b for a, b in pairs)
                    figures.setdefault(f"rung {rung}", []).append(found)
            metrics = httpx.get(f"{server.url}/metrics").text
            figures["metrics"] = [x for x in metrics.splitlines() if "engine_finished_total{" in x]
        _, left = psutil.wait_procs(family, timeout=60)
        figures |= {"processes": len(family), "processes left": len(left)}
    Console().print(figures)
    record("vllm-server", {"model": given.model.name, "rungs": rungs} | figures)


if __name__ == "__main__":
    main()
