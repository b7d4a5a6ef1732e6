"""OpenAI's completions and chats, with depths."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from everydepth.errors import BatchError, EveryDepthError, SettingError
from everydepth.exits.generation.sampling import Sampling
from everydepth.exits.generation.text import TextStream
from everydepth.serving.bodies import Chat, Completion, Message, Tokens, Wanted
from everydepth.serving.engine import Engine
from everydepth.serving.guard import described
from everydepth.serving.http import application
from everydepth.serving.meter import Meter
from everydepth.serving.names import Menu
from everydepth.serving.request import Finish
from everydepth.serving.request import Request as Asked

T = TypeVar("T")


class Server:
    """Serves one language model; `app` is the ASGI application.

    Without a temperature, decoding is greedy.
    """

    def __init__(
        self,
        menu: Menu,
        engine: Engine,
        tokenizer: Any,
        *,
        ends: Sequence[int] = (),
        positions: int | None = None,
        key: str | None = None,
        largest: int = 2**20,
    ) -> None:
        self.menu, self.engine, self.tokenizer = menu, engine, tokenizer
        self._ends, self._positions = tuple(ends), positions
        self.meter = Meter(menu, engine)
        self.app = application(engine, self.meter, menu, key=key, largest=largest)
        self.app.post("/v1/completions")(self.complete)
        self.app.post("/v1/chat/completions")(self.chat)

    async def complete(self, body: Completion, http: Request) -> Response:
        prompts = await asyncio.to_thread(self._tokenized, body.prompt)
        return await self._answer(body, prompts, http)

    async def chat(self, body: Chat, http: Request) -> Response:
        limit = body.max_completion_tokens or body.max_tokens
        body = body.model_copy(update={"max_tokens": limit})
        prompt = await asyncio.to_thread(self._templated, body.messages)
        return await self._answer(body, [prompt], http)

    # -- from bodies to requests ------------------------------------------------------------------

    def _tokenized(self, prompt: str | Tokens | list[str] | list[Tokens]) -> list[list[int]]:
        if not prompt:
            raise BatchError("the prompt is empty; send a text or its tokens")
        one = isinstance(prompt, str) or isinstance(prompt[0], int)
        parts: list[Any] = [prompt] if one else list(prompt)
        return [list(self.tokenizer(p)["input_ids"] if isinstance(p, str) else p) for p in parts]

    def _templated(self, messages: list[Message]) -> list[int]:
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise SettingError(
                f"{self.menu.name} has no chat template; send the text to /v1/completions"
            )
        from jinja2 import TemplateError

        said = [{"role": message.role, "content": message.text} for message in messages]
        try:
            found = self.tokenizer.apply_chat_template(said, add_generation_prompt=True)
        except TemplateError as error:
            raise BatchError(
                f"the chat template of {self.menu.name} does not take these messages: {error}"
            ) from error
        return list(found if isinstance(found, list) else found["input_ids"])

    def _asked(self, body: Wanted, prompt: list[int]) -> Asked:
        sampling = Sampling()
        if body.temperature:
            sampling = Sampling(
                do_sample=True, temperature=body.temperature, top_p=body.top_p, top_k=body.top_k
            )
        elif body.top_p not in (None, 1) or body.top_k is not None:
            raise SettingError("top_p and top_k choose what is drawn; send a temperature above 0")
        most = 64 if self._positions is None else max(1, min(64, self._positions - len(prompt)))
        return Asked(
            prompt=tuple(prompt),
            max_tokens=body.max_tokens or most,
            depth=self.menu.depth_of(body.model, body.depth),
            draft_depth=body.draft_depth,
            policy=self.menu.policy_of(body.policy),
            sampling=sampling,
            seed=body.seed,
            ends=self._ends,
            whole=not body.stream and not body.stop,
        )

    # -- from tokens to answers -------------------------------------------------------------------

    async def _answer(self, body: Wanted, prompts: list[list[int]], http: Request) -> Response:
        asked = [self._asked(body, prompt) for prompt in prompts]
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if any(not stop for stop in stops):
            raise SettingError("an empty stop string would stop every text; leave it out")
        form = _Form(body, sum(map(len, prompts)))
        parts = _merged([self._spoken(request, stops) for request in asked])
        if body.stream:
            first = await anext(parts)  # a refusal is a status code, not half an answer
            return StreamingResponse(form.events(first, parts), media_type="text/event-stream")
        said = await _while_connected(http, _collected(parts))
        return Response(status_code=499) if said is None else JSONResponse(form.whole(said))

    async def _spoken(self, request: Asked, stops: Sequence[str]) -> AsyncGenerator[_Spoken, None]:
        """The text of one request, as it is generated."""
        text = TextStream(self.tokenizer, stops, request.prompt)
        tokens, begin, first = 0, time.monotonic(), None
        async with aclosing(self.engine.run(request)) as pieces:
            async for piece in pieces:
                if first is None:
                    first = time.monotonic() - begin
                    self.meter.first(first)
                tokens += len(piece.tokens)
                # The token that ends a text is not part of it.
                shown = piece.tokens[:-1] if piece.finish == "stop" else piece.tokens
                new = text.add(shown, last=piece.finish is not None)
                finish = "stop" if text.stopped else piece.finish
                yield _Spoken(new, piece.depth, finish, piece.tokens, piece.exits)
                if finish is not None:
                    took = time.monotonic() - begin
                    self.meter.ended(took, piece.depth, tokens, finish, first)
                    return


@dataclass(frozen=True)
class _Spoken:
    """A part of an answer; exits: the depth of each of its tokens, if a policy chose it."""

    text: str
    depth: int
    finish: Finish | None
    ids: tuple[int, ...]
    exits: tuple[int, ...]

    def __add__(self, later: _Spoken) -> _Spoken:
        text, ids, exits = self.text + later.text, self.ids + later.ids, self.exits + later.exits
        return _Spoken(text, later.depth, later.finish, ids, exits)


class _Form:
    """The JSON of an answer: OpenAI's, with depths."""

    def __init__(self, body: Wanted, prompt_tokens: int) -> None:
        self._chats, self._ids, self._read = (
            isinstance(body, Chat),
            body.return_token_ids,
            prompt_tokens,
        )
        self._usage = body.stream_options is not None and body.stream_options.include_usage
        kind = "chat.completion" if self._chats else "text_completion"
        self._head = {
            "id": f"ed-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if self._chats and body.stream else kind,
            "created": int(time.time()),
            "model": body.model,
        }

    def whole(self, said: dict[int, _Spoken]) -> dict[str, Any]:
        choices = [self._choice(i, said[i], "message") for i in sorted(said)]
        usage = self._used(sum(len(one.ids) for one in said.values()))
        return self._head | {"choices": choices, "usage": usage}

    async def events(
        self, first: tuple[int, _Spoken], rest: AsyncGenerator[tuple[int, _Spoken], None]
    ) -> AsyncGenerator[str, None]:
        """One event for each part; the last one tells the usage, if asked."""
        begun, count = set[int](), 0

        def event(**content: Any) -> str:
            return f"data: {json.dumps(content)}\n\n"

        def part(index: int, said: _Spoken) -> str:
            nonlocal count
            count += len(said.ids)
            choice = self._choice(index, said, "delta", first=index not in begun)
            begun.add(index)
            return event(**self._head, choices=[choice])

        async with aclosing(rest):
            yield part(*first)
            try:
                async for index, said in rest:
                    yield part(index, said)
            except EveryDepthError as error:
                yield event(error=described(str(error), type(error).__name__))
        if self._usage:
            yield event(**self._head, choices=[], usage=self._used(count))
        yield "data: [DONE]\n\n"

    def _choice(self, index: int, said: _Spoken, key: str, *, first: bool = True) -> dict[str, Any]:
        found: dict[str, Any] = {"index": index, "finish_reason": said.finish}
        found["depth"] = said.depth
        if said.exits:
            found["exit_depths"] = said.exits
        if self._ids:
            found["token_ids"] = said.ids
        if not self._chats:
            return found | {"text": said.text, "logprobs": None}
        # Clients join the parts of a stream field by field: only the first names the role.
        role = {"role": "assistant"} if first else {}
        return found | {key: role | {"content": said.text}}

    def _used(self, said: int) -> dict[str, int]:
        read = self._read
        return {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}


async def _merged(
    sources: list[AsyncGenerator[_Spoken, None]],
) -> AsyncGenerator[tuple[int, _Spoken], None]:
    """The parts of several answers, in order of arrival; the first error ends all."""
    found: asyncio.Queue[tuple[int, _Spoken] | Exception | None] = asyncio.Queue()

    async def forward(index: int, source: AsyncGenerator[_Spoken, None]) -> None:
        async with aclosing(source):
            try:
                async for said in source:
                    found.put_nowait((index, said))
            except Exception as error:  # noqa: BLE001 - handed on to whoever waits
                found.put_nowait(error)
            else:
                found.put_nowait(None)

    tasks = [asyncio.create_task(forward(i, source)) for i, source in enumerate(sources)]
    try:
        left = len(tasks)
        while left:
            item = await found.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _collected(parts: AsyncGenerator[tuple[int, _Spoken], None]) -> dict[int, _Spoken]:
    said: dict[int, _Spoken] = {}
    async for index, one in parts:
        said[index] = said[index] + one if index in said else one
    return said


async def _while_connected(http: Request, work: Awaitable[T]) -> T | None:
    """The result; None if the client disconnects, which cancels the work."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
