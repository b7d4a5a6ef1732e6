"""Engines that are servers themselves: each depth is a plain checkpoint with its own address."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any, cast

import httpx

from everydepth.errors import BatchError, DepthError, EveryDepthError, SettingError
from everydepth.serving.costs import Costs
from everydepth.serving.engine import Failed, Piece, Stopped
from everydepth.serving.governor import Fixed, Governor, Load
from everydepth.serving.request import Finish, Request
from everydepth.serving.scheduler import Busy, Counts
from everydepth.serving.shared import Work
from everydepth.stream import ResidualStream

_log = logging.getLogger(__name__)

WRONG: dict[int, type[EveryDepthError]] = {400: BatchError, 429: Busy, 503: Busy}
"""What an engine's status code means; with any other, it failed."""


@dataclass(eq=False)
class Rung:
    """A depth behind an address. draft: the depth its server drafts with."""

    url: str
    model: str
    draft: int | None = None
    at_work: list[Request] = field(default_factory=list[Request])


Tokens = tuple[tuple[int, ...], Finish | None]
"""New tokens of a request; with the last ones, also why it ended."""
Speaks = Callable[[Rung, Request], AsyncGenerator[Tokens, None]]
"""Sends a request to a rung."""


async def completions(rung: Rung, request: Request) -> AsyncGenerator[Tokens, None]:
    """Ask OpenAI's completions route, with token ids in the prompt and in the answer."""
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
    async for found in events(rung, "/v1/completions", body):
        choice = found["choices"][0]
        if "token_ids" not in choice:
            raise Failed(f"{rung.model} returns no token_ids; use a newer version of the engine")
        yield tuple(choice["token_ids"] or ()), cast(Finish | None, choice["finish_reason"])


async def events(rung: Rung, path: str, body: Any) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON objects in a server's answer: a stream of events, or one."""
    try:
        async with (
            httpx.AsyncClient(timeout=httpx.Timeout(30, read=None)) as client,
            client.stream("POST", rung.url + path, json=body) as answer,
        ):
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")[:300]
                wrong = WRONG.get(answer.status_code, Failed)
                raise wrong(f"{rung.model} answers {answer.status_code}: {text}")
            async for line in answer.aiter_lines():
                if line.removeprefix("data: ") in ("", "[DONE]"):
                    continue
                found: dict[str, Any] = json.loads(line.removeprefix("data: "))
                if "error" in found:
                    raise Failed(f"{rung.model}: {found['error']}")
                yield found
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        _log.warning("%s at %s does not answer: %r", rung.model, rung.url, error)
        raise Stopped(
            f"the server of {rung.model} does not answer ({type(error).__name__}); send the "
            "request again later, or with another depth"
        ) from error


async def _understood(
    rung: Rung, said: AsyncGenerator[Tokens, None]
) -> AsyncGenerator[Tokens, None]:
    """What an engine says, up to the end of the text."""
    async with aclosing(said):
        try:
            async for tokens, finish in said:
                yield tokens, finish
                if finish is not None:
                    return
        except EveryDepthError:
            raise
        except (LookupError, TypeError, ValueError) as error:
            _log.warning("%s at %s gives no answer of an engine: %r", rung.model, rung.url, error)
            raise Failed(
                f"the answer of {rung.model} cannot be read ({type(error).__name__}); check that "
                "its address is that of the engine"
            ) from error
    raise Stopped(f"the answer of {rung.model} broke off; send the request again later")


class Upstream:
    """Routes requests to servers of single depths: vLLM, llama.cpp, or another everydepth server.

    speaks: sends a request to a rung.
    """

    def __init__(
        self,
        stream: ResidualStream,
        rungs: Mapping[int, Rung],
        *,
        governor: Governor | None = None,
        places: int = 256,
        speaks: Speaks = completions,
    ) -> None:
        if not rungs:
            raise SettingError("rungs is empty; give at least one depth")
        self.stream, self.rungs = stream, dict(sorted(rungs.items()))
        self.governor = governor or Fixed(max(self.rungs))
        self.places, self._speaks = places, speaks
        self.costs, self.counts = Costs(), Counts()
        self._running, self._held = False, ExitStack()

    def start(self) -> None:
        self._running = True

    def stop(self) -> None:
        self._running = False
        self._held.close()  # what a subclass started

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
        depth = self._depth(request, self._load())
        rung, begin, count, ended = self.rungs[depth], time.monotonic(), 0, False
        self.counts.requests += 1
        self.counts.prompt_tokens += len(request.prompt)
        rung.at_work.append(request)
        try:
            async with aclosing(_understood(rung, self._speaks(rung, request))) as pieces:
                async for tokens, finish in pieces:
                    count += len(tokens)
                    self.counts.tokens += len(tokens)
                    if finish is not None:
                        ended = True
                        seconds = time.monotonic() - begin
                        passes = depth * (count + len(request.prompt))
                        self.costs.learn(Work(depth * count, passes, count, count), seconds)
                        if request.depth is None:
                            self.governor.learn(count, 0.0, seconds)
                    yield Piece(tokens, depth, finish)
        finally:
            rung.at_work.remove(request)
            self.counts.finished += ended
            self.counts.cancelled += not ended

    def _depth(self, request: Request, load: Load) -> int:
        if request.policy is not None:
            raise SettingError(
                "this engine serves single depths, without exits; use a policy with "
                "--engine embedded"
            )
        depth = request.depth
        if depth is None:
            depth = self.governor.choose(load, len(request.prompt), request.max_tokens, 0.0)
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
