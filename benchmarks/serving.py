"""Serving: our server and `transformers serve` under the same load; the governor under overload.

    python benchmarks/serving.py [--model stories15M] [--tuned runs/stories15M-lpa] [--smoke]

`--model` is the folder of a small language model with its tokenizer (by default stories15M of
EVERYDEPTH_DATA); both servers get one copy of it in float32, one compute thread each, and the same
prompts, greedy, so many clients at once. The two alternate; tokens a CPU second of the server's
process are less disturbed by other programs than the clock. `transformers serve` needs the package
`openai`; where it is missing the peer is left out, and said so.

Depth: the server at depth k beside a server of the cut model. Drafting: also with a model that was
trained for it (`--tuned`, made by benchmarks/decoding.py).

Governor: for a minute, requests with long prompts and short answers arrive at random, at twice the
rate that full depth sustains, with and without a target. The model (`--governed`) should be trained
for every depth; with short prompts and a head of 32,000 words no depth is twice as fast as the
whole. A certified depth is the floor. The engine computes all tokens on a clock of CPU seconds
(`everydepth.serving.replay`), because a clock on the wall would measure what else the machine does;
HTTP is not part of it. A simulation from a profile (`--simulate`) is compared with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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
from unittest.mock import patch

import httpx
import numpy as np
import psutil
import torch
from decoding import own_stories, tiny_model
from record import RESULTS, SMOKE, record, sized
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import everydepth as ed
from everydepth.environment import DATA_VARIABLE
from everydepth.exits.certify import certified_depth, certify_depth, depth_risks
from everydepth.serving import (
    Arrival,
    Deadline,
    Fixed,
    Governor,
    LoadResult,
    replay,
    simulate,
)
from everydepth.serving.simulation import price_of

PROMPTS = (
    "Once upon a time",
    "One day, a little girl named Lily found a needle in her room.",
    "Tom and his dog went to the big park.",
    "The old man had a red boat. He",
)
NAME = "stories15M"
WANTED = {
    "tokens a CPU second over transformers serve": 1.2,
    "tokens a CPU second over transformers serve, batching": 1.2,
    "drafting over plain, tuned": 1.0,
    "drafting over plain": 0.98,
    "depth k over a cut model": 1 / 1.15,
}


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
def started(
    command: list[str], port: int, model: str, *, patience: float = 180
) -> Generator[Server, None, None]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + patience
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
    parser.add_argument("--tuned", default=None, help="the same model, trained for every depth")
    parser.add_argument("--seconds", type=float, default=sized(60.0, 0.2))
    parser.add_argument("--target", type=float, default=2.0, help="seconds; of the governor")
    parser.add_argument("--governed", type=Path, default=Path("runs", f"{NAME}-lpa"))
    parser.add_argument("--risk", type=float, default=0.1, help="predictions the floor may change")
    parser.add_argument("--part", choices=("all", "servers", "overload"), default="all")
    given = parser.parse_args()
    if SMOKE:
        given.model = given.tuned = str(tiny_model(RESULTS / NAME))
        given.governed, given.risk = Path(given.model), 0.9
    torch.set_num_threads(1)
    console = Console()
    before = RESULTS / "serving.json"
    kept = json.loads(before.read_text()) if given.part != "all" and before.is_file() else {}
    figures = {k: v for k, v in kept.items() if k != "machine"}
    if given.part != "overload":
        figures |= servers(given, console)
    if given.part != "servers" and not given.governed.is_dir():
        console.print(f"no model in {given.governed}: left out (benchmarks/decoding.py makes it)")
    elif given.part != "servers":
        figures["overload"] = overload(given, console)
    console.print(f"wrote {record('serving', figures)}")


def servers(given: Any, console: Console) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        whole, half = Path(temporary) / "whole", Path(temporary) / "half"
        model, tokenizer = copied(given.model, whole)
        depth = ed.as_stream(model).depth
        ed.at_depth(model, depth // 2).save_pretrained(half)
        tokenizer.save_pretrained(half)
        tuned = None
        if given.tuned is not None:
            tuned = Path(temporary) / "tuned"
            copied(given.tuned, tuned)
        return {
            "model": Path(given.model).name,
            "depth": depth,
            "load": {k: vars(given)[k] for k in ("clients", "requests", "tokens", "rounds")},
            **measured(given, console, whole, half, tuned, depth),
        }


def measured(
    given: Any, console: Console, whole: Path, half: Path, tuned: Path | None, depth: int
) -> dict[str, Any]:
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
        if tuned is not None:
            ready = stack.enter_context(ours(tuned))
            ways["ours, tuned, full depth"] = (ready, {})
            ways["ours, tuned, drafting"] = (ready, {"draft_depth": max(1, depth // 3)})
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
        figures["drafting over plain"] = best["ours, drafting"] / best["ours, full depth"]
        if tuned is not None:
            figures["drafting over plain, tuned"] = (
                best["ours, tuned, drafting"] / best["ours, tuned, full depth"]
            )
        for peer in ("transformers serve", "transformers serve, batching"):
            if peer in best:
                figures[f"tokens a CPU second over {peer}"] = best["ours, full depth"] / best[peer]
    figures["wanted"] = WANTED
    return figures


def overload(given: Any, console: Console) -> dict[str, Any]:
    """Twice what full depth sustains, for a minute; and what a simulation says of it."""
    model = AutoModelForCausalLM.from_pretrained(given.governed, dtype=torch.float32).eval()
    stream = ed.as_stream(model)
    last, (prompt, tokens) = stream.depth, sized((128, 8), (6, 4))
    drawn = own_stories(model, sized(64, 8), sized(64, 8), first_seed=1000)
    seen = [{"input_ids": part} for part in drawn.split(16)]
    quality = [float(value) for value in 1 - depth_risks(stream, seen).mean(0)]
    policy = certify_depth(model, seen, risk=given.risk, progress=False)
    floor = certified_depth(policy, stream)

    def load(rate: float, seconds: float) -> list[Arrival]:
        """Arrivals at random: the same for all."""
        gaps = np.random.default_rng(0).exponential(1 / rate, int(2 * rate * seconds) + 8)
        times = [float(at) for at in np.cumsum(gaps) if at <= seconds]
        return [Arrival(at=at, prompt=prompt, tokens=tokens) for at in times]

    def row(ran: Any, seconds: float, way: Governor) -> dict[str, float]:
        return ran(load(rate, seconds), way).numbers | {"seconds": seconds}

    def real(arrivals: list[Arrival], way: Governor) -> LoadResult:
        return replay(stream, arrivals, governor=way, quality=quality)

    def simulated(arrivals: list[Arrival], way: Governor) -> LoadResult:
        return simulate(stream, arrivals, price, governor=way, quality=quality)

    busy = [Arrival(at=0, prompt=prompt, tokens=tokens)] * sized(64, 4)
    rate = 2 * real(busy, Fixed(last)).numbers["tokens_per_second"] / tokens
    with patch.object(time, "perf_counter", time.process_time):  # others use this machine, too
        profile = ed.profile(model, seen[:1], batch_size=8, progress=False)
    price = price_of(profile)
    # Without a governor the queue only grows: a third of the minute shows how.
    third, depths = given.seconds / 3, range(floor, last + 1)
    rows = {
        "governor": row(real, given.seconds, Deadline(given.target, depths)),
        "full depth": row(real, third, Fixed(last)),
        "governor, simulated": row(simulated, given.seconds, Deadline(given.target, depths)),
        "full depth, simulated": row(simulated, third, Fixed(last)),
    }
    table = Table("at twice the load", "requests", "p50 s", "p95 s", "mean depth", "as full depth")
    for name, found in rows.items():
        cells = (f"{found[key]:.2f}" for key in ("p50_seconds", "p95_seconds", "mean_depth"))
        table.add_row(name, f"{found['requests']:.0f}", *cells, f"{found['mean_quality']:.3f}")
    console.print(table)
    assert policy.certificate is not None
    return rows | {
        "model": given.governed.name,
        "arrivals": len(load(rate, given.seconds)),
        "requests_per_cpu_second": rate,
        "prompt_tokens": prompt,
        "new_tokens": tokens,
        "target_seconds": given.target,
        "predictions_as_full_depth": quality,
        "certified_depth": floor,
        "quality_floor": quality[floor - 1],
        "certificate": policy.certificate.note,
        "price_of_the_profile": vars(price),
    }


if __name__ == "__main__":
    main()
