"""Serving: our server and `transformers serve` under the same load; the governor under overload.

    python benchmarks/serving.py servers [--model stories15M] [--tuned FOLDER] [--quoting]
    python benchmarks/serving.py profile FOLDER
    python benchmarks/serving.py overload FOLDER [--target 3] [--worst 3]
    python benchmarks/serving.py page

servers: every server gets the same copy of a language model of EVERYDEPTH_DATA in float32, one
compute thread, and the same prompts from `--clients` clients at once; decoding is greedy. The
servers take turns. Speed is in tokens per CPU second of the server's process, which other programs
disturb less than the clock. Depth k is compared with a server of the cut model; a model with
balconies (`--tuned`) drafts with the shallowest one. `transformers serve` needs the package
`openai`, and is left out with a message if it is missing. `--quoting` continues the first 32 tokens
of rows of WikiText-2 in place of stories: texts that often repeat themselves, where drafts from the
text may pay off.

overload: for a minute, requests with 32 to 96 prompt tokens and 8 to 24 new ones arrive at random
over HTTP, at twice the rate that full depth sustains: the rate at which it answers 64 requests that
come at once. One server has a target (`--target`: 95 % of requests within this many seconds) and a
floor of quality (`--worst`: at most this many times the perplexity of the last depth); the other
always uses full depth. FOLDER is a model usable at several depths, such as checkpoints/all of
`everydepth reproduce smollm2`; its depths are measured first (`profile`), and the profile is kept
in FOLDER. Latencies count from when a request was due, by the wall clock: use a machine that does
nothing else.

page: the figure and the tables of docs/serving.md, from what was recorded.
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
from collections import Counter
from collections.abc import Generator, Sequence
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
from pretrained import read
from record import RESULTS, SMOKE, record_times, recorded_everywhere, recorded_times, sized
from rich.console import Console

import everydepth as ed
from everydepth.environment import DATA_VARIABLE
from everydepth.exits.generation.packing import packed_maps
from everydepth.exits.load import load_tokenizer
from everydepth.exits.profile import Profile
from everydepth.serving import Arrival, Deadline, Fixed, Governor, simulate
from everydepth.serving.seen import Answered, answered
from everydepth.serving.shared import extra_blocks
from everydepth.serving.simulation import price_of

PAGE = Path(__file__).parents[1] / "docs" / "serving.md"
FIGURE = sized(PAGE.parent / "assets", RESULTS) / "serving-overload.png"
BEGIN, END = "<!-- measured: python benchmarks/serving.py page -->", "<!-- end of measured -->"
PROMPTS = (
    "Once upon a time",
    "One day, a little girl named Lily found a needle in her room.",
    "Tom and his dog went to the big park.",
    "The old man had a red boat. He",
)
WANTED = {
    "over transformers serve": 1.2,
    "over transformers serve, batching": 1.2,
    "drafting over plain, tuned": 1.0,
    "drafting over plain": 0.98,
    "depth k over a cut model": 1 / 1.15,
}
# transformers serve decodes the new tokens alone: a tokenizer like Llama's then drops the blank
# before the first word. Our text follows the prompt, blank included.
SAME = "same text as full depth, leading blanks aside"
AT_ONCE = sized(64, 4)  # requests that tell what full depth sustains
TOGETHER = (1, 5, 8, 40)  # tokens in a pass: one or eight requests, alone or with four drafts each
READ, WRITTEN = sized((32, 96), (4, 8)), sized((8, 24), (2, 4))  # tokens: at least, at most


# -- servers --------------------------------------------------------------------------------------


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
def ours(folder: Path, *options: str, patience: float = 180) -> Generator[Server, None, None]:
    port = free_port()
    command = [sys.executable, "-m", "everydepth", "serve", str(folder), "--name", "m"]
    command += ["--port", str(port), *options]
    with started(command, port, "m", patience=patience) as server:
        yield server


@contextmanager
def theirs(folder: Path, *options: str) -> Generator[Server, None, None]:
    port = free_port()
    program = "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", program, "serve", str(folder), "--device", "cpu"]
    with started([*command, "--port", str(port), *options], port, str(folder)) as server:
        yield server


async def asked(client: httpx.AsyncClient, server: Server, prompt: Any, **body: Any) -> Any:
    told = {"model": server.model, "prompt": prompt, "temperature": 0} | body
    answer = await client.post(f"{server.url}/v1/completions", json=told)
    answer.raise_for_status()
    return answer.json()


async def loaded(
    server: Server, given: Any, prompts: Sequence[Any], **body: Any
) -> tuple[float, dict[int, str]]:
    """Each client sends one request after the other: tokens per CPU second, and the texts."""
    texts: dict[int, str] = {}
    count = 0
    async with httpx.AsyncClient(timeout=600) as client:

        async def one(number: int) -> None:
            nonlocal count
            for i in range(number, given.requests, given.clients):
                prompt = prompts[i % len(prompts)]
                found = await asked(client, server, prompt, max_tokens=given.tokens, **body)
                texts[i] = found["choices"][0]["text"]
                count += found["usage"]["completion_tokens"]

        cpu = server.cpu()
        await asyncio.gather(*(one(i) for i in range(given.clients)))
        return count / max(server.cpu() - cpu, 1e-9), texts


def copied(model: Any, tokenizer: Any, folder: Path) -> Path:
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def servers(given: Any, console: Console) -> dict[str, Any]:
    source = Path(os.environ.get(DATA_VARIABLE, "."), given.model)
    whole, tokenizer = ed.load(source).float(), load_tokenizer(source)
    depth = ed.as_stream(whole).depth
    k = depth // 2
    prompts: Sequence[Any] = PROMPTS
    if given.quoting:
        prompts = read(tokenizer, "test", given.requests)[:, :32].tolist()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        copied(whole, tokenizer, folder / "whole")
        copied(ed.at_depth(whole, k), tokenizer, folder / "half")
        mine = stack.enter_context(ours(folder / "whole"))
        ways: dict[str, tuple[Server, dict[str, Any]]] = {
            "full depth": (mine, {}),
            f"full depth, asked to draft at depth {k}": (mine, {"draft_depth": k}),
            "full depth, asked to draft from the text": (mine, {"draft_depth": 0}),
            f"depth {k}": (mine, {"depth": k}),
            f"model cut to {k}": (stack.enter_context(ours(folder / "half")), {}),
        }
        if given.tuned is not None:
            ready = stack.enter_context(ours(given.tuned))
            draft = min(ed.as_stream(ed.load(given.tuned)).exits)
            ways["tuned, full depth"] = (ready, {})
            ways["tuned, drafting"] = (ready, {"draft_depth": draft})
        if find_spec("openai") is None:
            console.print("openai is not installed: transformers serve is left out")
        else:
            plain = stack.enter_context(theirs(folder / "whole"))
            ways["transformers serve"] = (plain, {})
            # Left alone, its cache takes most of the memory there is, and the system ends it.
            batching = ("--continuous-batching", "--cb-max-memory-percent", "0.1")
            batched = stack.enter_context(theirs(folder / "whole", *batching))
            ways["transformers serve, batching"] = (batched, {})
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        texts: dict[str, dict[int, str]] = {}
        failed: dict[str, str] = {}
        for _ in range(given.rounds):
            for way, (server, body) in ways.items():
                try:
                    speed, texts[way] = asyncio.run(loaded(server, given, prompts, **body))
                except httpx.HTTPError as error:
                    failed[way] = repr(error)
                    continue
                speeds[way].append(round(speed, 1))
    speeds = {way: found for way, found in speeds.items() if found}
    return {
        "depth": depth,
        "failed": failed,
        "load": {name: vars(given)[name] for name in ("clients", "requests", "tokens", "rounds")},
        "ways": {way: {"tokens_per_cpu_second": found} for way, found in speeds.items()},
        SAME: {
            way: sum(said[i].lstrip() == text.lstrip() for i, text in texts["full depth"].items())
            / len(said)
            for way, said in texts.items()
        },
        "CPU milliseconds per token, by tokens in a pass": token_costs(whole),
        "ratios": ratios({way: max(found) for way, found in speeds.items()}, k),
        "wanted": WANTED,
    }


@torch.no_grad()
def token_costs(model: Any) -> dict[int, float]:
    """What a token costs in passes over more and more of them, as the server makes them."""
    best = dict.fromkeys(TOGETHER, float("inf"))
    with packed_maps(model):
        for _ in range(sized(7, 1)):
            for count in best:
                tokens = torch.arange(count)[:, None]
                begin = time.process_time()
                model(tokens, use_cache=False)
                best[count] = min(best[count], (time.process_time() - begin) / count)
    return {count: round(1e3 * seconds, 3) for count, seconds in best.items()}


def ratios(best: dict[str, float], k: int) -> dict[str, float]:
    """Best round against best round."""
    pairs = {
        "over transformers serve": ("full depth", "transformers serve"),
        "over transformers serve, batching": ("full depth", "transformers serve, batching"),
        "drafting over plain": (f"full depth, asked to draft at depth {k}", "full depth"),
        "drafting from the text over plain": (
            "full depth, asked to draft from the text",
            "full depth",
        ),
        "drafting over plain, tuned": ("tuned, drafting", "tuned, full depth"),
        "depth k over a cut model": (f"depth {k}", f"model cut to {k}"),
    }
    return {
        name: round(best[one] / best[other], 3)
        for name, (one, other) in pairs.items()
        if one in best and other in best
    }


# -- overload -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Due:
    """A request, and when it is to be sent."""

    at: float
    prompt: list[int]
    tokens: int


def dues(texts: torch.Tensor, times: Sequence[float]) -> list[Due]:
    """A request for every time: the beginning of a text, both lengths at random."""
    rng = np.random.default_rng(0)
    long = rng.integers(*READ, len(times), endpoint=True)
    wanted = rng.integers(*WRITTEN, len(times), endpoint=True)
    return [
        Due(at, texts[i % len(texts), : long[i]].tolist(), int(wanted[i]))
        for i, at in enumerate(times)
    ]


def at_random(rate: float, seconds: float) -> list[float]:
    gaps = np.random.default_rng(1).exponential(1 / rate, int(2 * rate * seconds) + 50)
    return [float(at) for at in np.cumsum(gaps) if at <= seconds]


async def rushed(server: Server, load: list[Due]) -> tuple[list[Answered], list[str]]:
    """What came of requests that were sent when they were due, and of those that failed."""
    seen: list[Answered] = []
    lost: list[str] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        begin = time.perf_counter()

        async def one(due: Due) -> None:
            await asyncio.sleep(begin + due.at - time.perf_counter())
            try:
                found = await asked(client, server, due.prompt, max_tokens=due.tokens)
            except httpx.HTTPError as error:
                lost.append(repr(error))
                return
            ended = time.perf_counter() - begin
            depth, count = found["choices"][0]["depth"], found["usage"]["completion_tokens"]
            took = ended - due.at
            seen.append(Answered(at=due.at, seconds=took, first=took, depth=depth, tokens=count))

        await asyncio.gather(*map(one, load))
    return sorted(seen, key=lambda one: one.at), lost


def profiled(given: Any, console: Console) -> None:
    """Quality and speed of the depths that were trained, on one half of the held-out texts."""
    rows, net = texts_for(given.folder)[0], ed.load(given.folder)
    stream = ed.as_stream(net)
    data = [{"input_ids": part, "labels": part} for part in rows.split(4)]
    found = ed.profile(net, data, depths=[*stream.exits, stream.depth], batch_size=4, repeats=3)
    found.save(given.folder / "profile")
    console.print(found.table())


def texts_for(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Held-out rows: to profile, and to ask."""
    if SMOKE:
        first, second = torch.randint(3, 40, (2, 8, 12))
    else:
        first, second = read(load_tokenizer(folder), "test", 64).split(32)
    return first, second


def overload(given: Any, console: Console) -> dict[str, Any]:
    net = ed.load(given.folder)
    stream, profile = ed.as_stream(net), Profile.load(given.folder / "profile")
    last, texts = stream.depth, texts_for(given.folder)[1]
    quality = {found.depth: found.quality for found in profile.depths}
    floor = given.worst * quality[last]
    allowed = [depth for depth, found in quality.items() if found <= floor]

    def told(seen: list[Answered], seconds: float) -> dict[str, float]:
        return answered(seen, seconds, quality=quality).numbers

    def simulated(load: list[Due], governor: Governor) -> dict[str, float]:
        price = price_of(profile, extra_blocks(stream))
        assert price is not None
        arrivals = [Arrival(at=d.at, prompt=len(d.prompt), tokens=d.tokens) for d in load]
        return simulate(stream, arrivals, price, governor=governor, quality=quality).numbers

    rows: dict[str, Any] = {}
    with ours(given.folder) as fixed:
        asyncio.run(rushed(fixed, dues(texts, [0.0])))  # the first one finds cold memory
        burst, _ = asyncio.run(rushed(fixed, dues(texts, [0.0] * AT_ONCE)))
        sustained = len(burst) / max(one.seconds for one in burst)
        load = dues(texts, at_random(2 * sustained, given.seconds))
        console.print(f"full depth sustains {sustained:.2f} requests a second; {len(load)} come")
        ways = {"full depth": fixed}
        options = ("--profile", given.folder / "profile", "--target", given.target)
        with ours(given.folder, *map(str, options), "--floor", str(floor)) as governed:
            asyncio.run(rushed(governed, dues(texts, [0.0])))
            for way, server in {"governor": governed, **ways}.items():
                seen, lost = asyncio.run(rushed(server, load))
                over = max((one.at + one.seconds for one in seen), default=given.seconds)
                rows[way] = told(seen, over) | {
                    "lost": len(lost),
                    "why": sorted(set(lost)),
                    "requests by depth": dict(sorted(Counter(one.depth for one in seen).items())),
                    "at": [round(one.at, 2) for one in seen],
                    "seconds": [round(one.seconds, 2) for one in seen],
                }
                console.print(
                    way, {k: v for k, v in rows[way].items() if k not in ("at", "seconds")}
                )
    rows["governor, simulated"] = simulated(load, Deadline(given.target, allowed))
    rows["full depth, simulated"] = simulated(load, Fixed(last))
    return {
        "model": given.folder.name if SMOKE else given.name,
        "seconds": given.seconds,
        "requests a second that full depth sustains": round(sustained, 3),
        "requests": len(load),
        "target_seconds": given.target,
        "depths": allowed,
        profile.metric: {depth: round(found, 2) for depth, found in quality.items()},
        "floor": round(floor, 2),
        "ways": rows,
    }


# -- the page -------------------------------------------------------------------------------------


def page(found: list[dict[str, Any]]) -> str:
    """What docs/serving.md says between the two marks, from the figures of every processor."""
    lines: list[str] = []
    for one in found:
        name = one["machine"]["processor"]["name"]
        for model, measured in one["servers"].items():
            lines += speeds_shown(f"{model} on one thread of an {name}", measured)
    for one in found:
        if one["overload"]:
            name = one["machine"]["processor"]["name"]
            lines += overload_shown(name, one["overload"])
    return "\n".join([BEGIN, "", *lines, END])


def speeds_shown(title: str, found: dict[str, Any]) -> list[str]:
    load = found["load"]
    lines = [
        f"{title}, {load['clients']} clients, {load['tokens']} tokens per request, best of "
        f"{load['rounds']} rounds in turn:",
        "",
        "| server | tokens per CPU second |",
        "|---|---|",
    ]
    for way, speeds in found["ways"].items():
        name = f"`{way.replace(', batching', ' --continuous-batching')}`"
        shown = name if way.startswith("transformers") else way
        lines.append(f"| {shown} | {max(speeds['tokens_per_cpu_second']):.0f} |")
    costs = found.get("CPU milliseconds per token, by tokens in a pass", {})
    if costs:
        told = ", ".join(f"{cost:.3g} ms in a pass over {count}" for count, cost in costs.items())
        lines += ["", f"A token costs {told}."]
    return [*lines, ""]


def overload_shown(processor: str, found: dict[str, Any]) -> list[str]:
    lines = [
        f"{found['model']} on one thread of an {processor}, {found['requests']} requests in "
        f"{found['seconds']:.0f} s, twice the "
        f"{found['requests a second that full depth sustains']:.2f} per second that full depth "
        f"sustains; target {found['target_seconds']:g} s, perplexity at most {found['floor']:.0f}:",
        "",
        "| at twice the load | p50 | p95 | mean depth | mean perplexity | lost |",
        "|---|---|---|---|---|---|",
    ]
    for way, row in found["ways"].items():
        cells = (f"{row['p50_seconds']:.1f} s", f"{row['p95_seconds']:.1f} s")
        more = (f"{row['mean_depth']:.1f}", f"{row['mean_quality']:.1f}", f"{row.get('lost', '')}")
        lines.append(f"| {' | '.join((way, *cells, *more))} |")
    return [*lines, ""]


def draw(over: dict[str, Any]) -> None:
    """Latency of every request by its arrival, and how many went how deep."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9.0, 3.4), dpi=150, layout="constrained")
    left, right = drawn.subplots(1, 2, width_ratios=(2, 1))
    colors = {"full depth": "#d55e00", "governor": "#0072b2"}
    for way, color in colors.items():
        row = over["ways"][way]
        left.plot(row["at"], row["seconds"], ".", color=color, label=way)
    left.axhline(over["target_seconds"], color="black", linewidth=0.8, label="target")
    left.set(xlabel="arrival (s)", ylabel="latency (s)", yscale="log")
    left.legend(frameon=False)
    depths = over["ways"]["governor"]["requests by depth"]
    right.bar([str(depth) for depth in depths], list(depths.values()), color=colors["governor"])
    right.set(xlabel="depth the governor chose", ylabel="requests")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    drawn.savefig(FIGURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = ("servers", "profile", "overload", "page")
    parser.add_argument("part", choices=parts, nargs="?", default="servers")
    parser.add_argument("folder", type=Path, nargs="?", help="a model usable at several depths")
    parser.add_argument("--name", default="SmolLM2-135M with balconies", help="of that model")
    parser.add_argument("--model", default="stories15M", help="a folder of EVERYDEPTH_DATA")
    parser.add_argument("--tuned", type=Path, help="the same model with balconies")
    parser.add_argument("--quoting", action="store_true", help="continue WikiText-2, not stories")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=sized(32, 4))
    parser.add_argument("--tokens", type=int, default=sized(64, 4))
    parser.add_argument("--rounds", type=int, default=sized(3, 1))
    parser.add_argument("--seconds", type=float, default=sized(60.0, 0.2))
    parser.add_argument("--target", type=float, default=3.0, help="seconds; of the governor")
    parser.add_argument("--worst", type=float, default=sized(3.0, 1e9), help="times perplexity")
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    if SMOKE:
        smoke(given, console)
        return
    if given.part == "profile":
        profiled(given, console)
        return
    if given.part == "page":
        found = recorded_everywhere("serving")
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        PAGE.write_text(before + page(found) + after, encoding="utf-8")
        draw(next(one["overload"] for one in found if one["overload"]))
        return
    kept = recorded_times("serving")
    figures = {name: kept.get(name, {}) for name in ("servers", "overload")}
    if given.part == "servers":
        name = f"{given.model}, continuing WikiText-2" if given.quoting else given.model
        figures["servers"][name] = servers(given, console)
        console.print(figures["servers"][name])
    else:
        figures["overload"] = overload(given, console)
    console.print(f"wrote {record_times('serving', figures)}")


def smoke(given: Any, console: Console) -> None:
    """Everything, of a tiny random model."""
    model = tiny_model(RESULTS / "tiny")
    given.model, given.folder = str(model), RESULTS / "balconies"
    given.tuned = given.folder
    net = ed.balcony(ed.load(model), [1, 3]).eval()
    copied(net.model, load_tokenizer(model), given.folder)
    profiled(given, console)
    figures = {"servers": {"tiny": servers(given, console)}, "overload": overload(given, console)}
    record_times("serving", figures)
    console.print(page(recorded_everywhere("serving")))
    draw(figures["overload"])


if __name__ == "__main__":
    main()
