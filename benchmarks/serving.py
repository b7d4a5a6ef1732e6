"""Serving: our server and `transformers serve` under the same load; the governor under overload.

    python benchmarks/serving.py [--model stories15M] [--seconds 60] [--smoke]

`--model` is the folder of a small language model with its tokenizer (by default stories15M of
EVERYDEPTH_DATA); both servers get one copy of it in float32, one compute thread each, and the same
prompts, greedy, so many clients at once. The two alternate; tokens a CPU second of the server's
process are less disturbed by other programs than the clock. `transformers serve` needs the package
`openai`; where it is missing the peer is left out, and said so.

Depth: the server at depth k beside a server of the cut model. Governor: requests arrive at twice
the rate that full depth sustains, with and without a target.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch
from decoding import tiny_model
from record import RESULTS, SMOKE, record, sized
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import everydepth as ed
from everydepth.environment import DATA_VARIABLE

PROMPTS = (
    "Once upon a time",
    "One day, a little girl named Lily found a needle in her room.",
    "Tom and his dog went to the big park.",
    "The old man had a red boat. He",
)
NAME = "stories15M"
WANTED = {"tokens a CPU second over transformers serve": 1.2, "depth k over a cut model": 1 / 1.15}


@dataclass(frozen=True)
class Server:
    """A server in a process of its own."""

    url: str
    model: str
    process: psutil.Process

    def cpu(self) -> float:
        family = [self.process, *self.process.children(recursive=True)]
        return sum(sum(one.cpu_times()[:2]) for one in family)


@contextmanager
def started(command: list[str], port: int, model: str) -> Generator[Server, None, None]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 180
        while True:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{' '.join(command)} did not start")
            try:
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.3)
        try:
            yield Server(url, model, psutil.Process(process.pid))
        finally:
            process.terminate()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def ours(folder: Path, *options: str) -> Generator[Server, None, None]:
    port = free_port()
    command = [sys.executable, "-m", "everydepth", "serve", str(folder), "--name", "m"]
    with started([*command, "--port", str(port), *options], port, "m") as server:
        yield server


@contextmanager
def theirs(folder: Path, *options: str) -> Generator[Server, None, None]:
    port = free_port()
    program = "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", program, "serve", str(folder), "--device", "cpu"]
    with started([*command, "--port", str(port), *options], port, str(folder)) as server:
        yield server


async def answered(client: httpx.AsyncClient, server: Server, prompt: str, **body: Any) -> Any:
    told = {"model": server.model, "prompt": prompt, "temperature": 0} | body
    answer = await client.post(f"{server.url}/v1/completions", json=told)
    answer.raise_for_status()
    return answer.json()


async def loaded(server: Server, clients: int, requests: int, tokens: int, **body: Any) -> Any:
    """Each client sends one request after the other: tokens, CPU seconds, seconds, texts."""
    texts: dict[int, str] = {}
    count = 0
    async with httpx.AsyncClient(timeout=600) as client:

        async def one(number: int) -> None:
            nonlocal count
            for i in range(number, requests, clients):
                prompt = PROMPTS[i % len(PROMPTS)]
                found = await answered(client, server, prompt, max_tokens=tokens, **body)
                texts[i] = found["choices"][0]["text"]
                count += found["usage"]["completion_tokens"]

        begin, cpu = time.perf_counter(), server.cpu()
        await asyncio.gather(*(one(i) for i in range(clients)))
        return count, server.cpu() - cpu, time.perf_counter() - begin, texts


async def arriving(server: Server, rate: float, seconds: float, tokens: int) -> dict[str, Any]:
    """Requests at a fixed rate, whether or not earlier ones are answered."""
    limits = httpx.Limits(max_connections=None)
    took: list[float] = []
    depths: list[int] = []
    failed = 0
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:

        async def one(i: int) -> None:
            nonlocal failed
            begin = time.perf_counter()
            try:
                found = await answered(client, server, PROMPTS[i % 4], max_tokens=tokens)
            except httpx.HTTPError:
                failed += 1
                return
            took.append(time.perf_counter() - begin)
            depths.append(found["choices"][0]["depth"])

        tasks: list[asyncio.Task[None]] = []
        begin = time.perf_counter()
        for i in range(max(1, int(rate * seconds))):
            await asyncio.sleep(max(0.0, begin + i / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(one(i)))
        await asyncio.gather(*tasks)
    return {
        "requests": len(tasks),
        "lost": failed,
        "p50_seconds": float(np.quantile(took, 0.5)),
        "p95_seconds": float(np.quantile(took, 0.95)),
        "mean_depth": float(np.mean(depths)),
        "least_depth": int(min(depths)),
        "depths": depths,
    }


def held_out(model: Any, tokenizer: Any) -> list[float]:
    """The loss of every depth on text the model itself would write: quality, for the record."""
    ids = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    found = ed.trace(model, [dict(ids)], ["loss"], progress=False)
    return [float(value) for value in found["loss"]]


def copied(source: str, folder: Path) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=f"{os.environ.get(DATA_VARIABLE, '.')}/{NAME}")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=sized(32, 4))
    parser.add_argument("--tokens", type=int, default=sized(64, 4))
    parser.add_argument("--rounds", type=int, default=sized(3, 1))
    parser.add_argument("--seconds", type=float, default=sized(60.0, 2.0))
    parser.add_argument("--target", type=float, default=3.0, help="seconds; of the governor")
    given = parser.parse_args()
    if SMOKE:
        given.model = str(tiny_model(RESULTS / NAME))
    console = Console()
    with tempfile.TemporaryDirectory() as temporary:
        whole, half = Path(temporary) / "whole", Path(temporary) / "half"
        model, tokenizer = copied(given.model, whole)
        depth = ed.as_stream(model).depth
        ed.at_depth(model, depth // 2).save_pretrained(half)
        tokenizer.save_pretrained(half)
        figures = {
            "model": Path(given.model).name,
            "depth": depth,
            "loss_by_depth": held_out(model, tokenizer),
            "load": {k: vars(given)[k] for k in ("clients", "requests", "tokens", "rounds")},
            **measured(given, console, whole, half, depth),
        }
    console.print(f"wrote {record('serving', figures)}")


def measured(given: Any, console: Console, whole: Path, half: Path, depth: int) -> dict[str, Any]:
    ways: dict[str, tuple[Server, dict[str, Any]]] = {}
    best: dict[str, float] = {}
    texts: dict[str, Any] = {}
    figures: dict[str, Any] = {}
    k = depth // 2
    with ExitStack() as stack:
        mine = stack.enter_context(ours(whole))
        ways["ours, full depth"] = (mine, {})
        ways["ours, drafting"] = (mine, {"draft_depth": k})
        ways[f"ours, depth {k}"] = (mine, {"depth": k})
        ways[f"ours, model cut to {k}"] = (stack.enter_context(ours(half)), {})
        if find_spec("openai") is None:
            console.print("openai is not installed: transformers serve is left out")
        else:
            ways["transformers serve"] = (stack.enter_context(theirs(whole)), {})
            batching = theirs(whole, "--continuous-batching")
            ways["transformers serve, batching"] = (stack.enter_context(batching), {})
        for _ in range(given.rounds):
            for name, (server, body) in ways.items():
                try:
                    count, cpu, _, said = asyncio.run(
                        loaded(server, given.clients, given.requests, given.tokens, **body)
                    )
                except httpx.HTTPStatusError as error:
                    figures.setdefault("failed", {})[name] = str(error.response.status_code)
                    continue
                best[name] = max(best.get(name, 0.0), count / max(cpu, 1e-9))
                texts[name] = said
        table = Table("server", "tokens a CPU second", "same text")
        reference = texts["ours, full depth"]
        for name, speed in best.items():
            same = sum(texts[name][i] == text for i, text in reference.items()) / len(reference)
            table.add_row(name, f"{speed:.1f}", f"{same:.0%}")
            figures[name] = {"tokens_per_cpu_second": speed, "same_text": same}
        console.print(table)
        figures["depth k over a cut model"] = (
            best[f"ours, depth {k}"] / best[f"ours, model cut to {k}"]
        )
        if "transformers serve" in best:
            figures["tokens a CPU second over transformers serve"] = (
                best["ours, full depth"] / best["transformers serve"]
            )
    figures |= overload(given, console, whole, best["ours, full depth"])
    figures["wanted"] = WANTED
    return figures


def overload(given: Any, console: Console, whole: Path, speed: float) -> dict[str, Any]:
    """Twice what full depth sustains, by the clock as it is now."""
    rows: dict[str, Any] = {}
    with ours(whole) as server:
        count, _, seconds, _ = asyncio.run(loaded(server, 16, sized(2 * 16, 4), given.tokens))
        rate = 2 * count / seconds / given.tokens
        rows["full depth"] = asyncio.run(arriving(server, rate, given.seconds, given.tokens))
    with ours(whole, "--target", str(given.target)) as server:
        asyncio.run(loaded(server, 8, sized(8, 2), given.tokens))  # learns prices
        rows["governor"] = asyncio.run(arriving(server, rate, given.seconds, given.tokens))
    table = Table("at twice the load", "requests", "lost", "p50 s", "p95 s", "mean depth")
    for name, row in rows.items():
        row.pop("depths")
        cells = (f"{row['p50_seconds']:.2f}", f"{row['p95_seconds']:.2f}")
        table.add_row(
            name, str(row["requests"]), str(row["lost"]), *cells, f"{row['mean_depth']:.2f}"
        )
    console.print(table)
    return {"overload": rows | {"requests_per_second": rate, "target_seconds": given.target}}


if __name__ == "__main__":
    main()
