"""Replicas under load: replaced one by one, then one of them killed.

    python benchmarks/replicas.py [--model stories15M] [--replicas 2]

`everydepth serve --ray` with a model of EVERYDEPTH_DATA, one compute thread per replica; each
client sends one request after the other. Meanwhile, in turn: nothing happens; `kill -USR1` of the
server replaces every replica; `kill -9` ends a replica, and Ray starts another. Recorded for each:
the requests by status, whether their tokens were those of `ed.generate`, and the slowest request.
Needs the extras `serve` and `ray`. On a machine so busy that Ray's own processes take over 15
seconds to start, Ray gives up.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from decoding import tiny_model
from record import RESULTS, SMOKE, record_times, sized
from rich.console import Console

import everydepth as ed
from everydepth.environment import DATA_VARIABLE
from everydepth.exits.load import load_tokenizer
from serving import PROMPTS, Server, ours

PATIENCE = 600.0  # the most seconds to wait for an event


def answering(server: Server) -> set[int]:
    """The replicas that are answering a request now; Ray writes that into the process title."""
    found: set[int] = set()
    for one in server.process.children(recursive=True):
        try:
            title = " ".join(one.cmdline())
            if title.startswith("ray::ServeReplica") and "handle_request" in title:
                found.add(one.pid)
        except psutil.Error:
            continue
    return found


async def until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        if time.monotonic() > end:
            raise SystemExit(f"{what}: not within {PATIENCE:.0f} s")
        await asyncio.sleep(0.2)


async def meanwhile(
    server: Server, right: list[list[int]], given: Any, happens: Callable[[], Awaitable[None]]
) -> dict[str, Any]:
    """The outcome of requests while something happens."""
    over, seen, took = asyncio.Event(), Counter[str](), list[float]()

    async def client(number: int) -> None:
        async with httpx.AsyncClient(timeout=PATIENCE) as connection:
            while not over.is_set():
                index = (number + sum(seen.values())) % len(PROMPTS)
                body: dict[str, Any] = {"model": "m", "prompt": PROMPTS[index]}
                body |= {"max_tokens": given.tokens} | {"return_token_ids": True}
                begin = time.monotonic()
                try:
                    answer = await connection.post(f"{server.url}/v1/completions", json=body)
                except httpx.HTTPError as error:
                    seen[type(error).__name__] += 1
                    continue
                took.append(time.monotonic() - begin)
                same = answer.status_code == 200 and (
                    answer.json()["choices"][0]["token_ids"] == right[index]
                )
                other = " with other tokens" if answer.status_code == 200 and not same else ""
                seen[f"{answer.status_code}{other}"] += 1

    async def event() -> None:
        await asyncio.sleep(given.seconds / 2)
        await happens()
        await asyncio.sleep(given.seconds / 2)
        over.set()

    begin = time.monotonic()
    await asyncio.gather(event(), *map(client, range(given.clients)))
    return {
        "requests": sum(seen.values()),
        "answers": dict(seen),
        "seconds": round(time.monotonic() - begin, 1),
        "p50_seconds": round(sorted(took)[len(took) // 2], 3),
        "slowest_seconds": round(max(took), 3),
    }


async def run(
    server: Server, right: list[list[int]], given: Any, console: Console
) -> dict[str, Any]:
    async def nothing() -> None:
        return

    async def fresh(count: int, old: set[int]) -> set[int]:
        """Wait for `count` replicas that are not old, each seen with a request."""
        seen: set[int] = set()

        def all_seen() -> bool:
            seen.update(answering(server) - old)
            return len(seen) == count

        await until(all_seen, f"{count} new replicas")
        return seen

    async def exchange() -> None:
        before = await fresh(given.replicas, set())
        server.process.send_signal(signal.SIGUSR1)
        await fresh(given.replicas, before)

    async def kill() -> None:
        before = await fresh(given.replicas, set())
        os.kill(min(before), signal.SIGKILL)
        await fresh(1, before)

    found: dict[str, Any] = {}
    for name, happens in {
        "nothing happens": nothing,
        "every replica is exchanged (kill -USR1)": exchange,
        "a replica is killed (kill -9)": kill,
    }.items():
        found[name] = await meanwhile(server, right, given, happens)
        console.print(name, found[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="stories15M", help="a folder of EVERYDEPTH_DATA")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=sized(32, 4))
    parser.add_argument("--seconds", type=float, default=sized(10.0, 0.5))
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = (
        tiny_model(RESULTS / "tiny") if SMOKE else Path(os.environ[DATA_VARIABLE]) / given.model
    )
    model, tokenizer = ed.load(folder), load_tokenizer(folder)
    right: list[list[int]] = []
    for prompt in PROMPTS:
        said = ed.generate(model, tokenizer(prompt)["input_ids"], max_new_tokens=given.tokens)
        right.append(said.tokens[0])
    console = Console()
    with ours(folder, "--ray", "--replicas", str(given.replicas), patience=PATIENCE) as server:
        found = asyncio.run(run(server, right, given, console))
    told = {"model": folder.name, "replicas": given.replicas, "clients": given.clients}
    console.print(record_times("replicas", told | {"tokens": given.tokens, "meanwhile": found}))


if __name__ == "__main__":
    main()
