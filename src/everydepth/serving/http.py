"""The HTTP server: OpenAI's API, with depths."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, model_validator
from starlette.exceptions import HTTPException as StarletteError

from everydepth.errors import BatchError, EveryDepthError, NonFiniteError, SettingError
from everydepth.exits.generation.sampling import Sampling
from everydepth.exits.generation.text import TextStream
from everydepth.serving.engine import Backend, Engine, Failed, Piece, Stopped
from everydepth.serving.meter import Meter
from everydepth.serving.names import Menu, UnknownModel
from everydepth.serving.request import Request as Asked
from everydepth.serving.scheduler import Busy

T = TypeVar("T")


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair is no text; send whole characters") from error
    return value


Text = Annotated[str, AfterValidator(_text)]
Tokens = list[Annotated[int, Field(strict=True, ge=0, lt=2**31)]]


# Unsupported fields of OpenAI's API, and the values at which they have no effect; None for fields
# that never change an answer. Any other field is refused.
NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (0, False),
    "metadata": None,
    "min_p": (0,),
    "parallel_tool_calls": None,
    "presence_penalty": (0,),
    "prompt_cache_key": None,
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "safety_identifier": None,
    "service_tier": None,
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_logprobs": (0,),
    "user": None,
}


class StreamOptions(BaseModel):
    include_usage: bool = False


class Wanted(BaseModel):
    """The common fields of completions and chats; fields without effect are dropped."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Literal[1] = 1
    depth: StrictInt | None = None
    draft_depth: StrictInt | None = None
    policy: str | None = None
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name in body.keys() - cls.model_fields:
            allowed = NEUTRAL.get(name, ())
            if allowed is not None and body[name] not in (None, *allowed):
                raise ValueError(f"{name} is not supported here; leave it out")
        if body.get("stream_options") is not None and not body.get("stream"):
            raise ValueError("stream_options go with stream; leave them out, or stream the answer")
        return {name: value for name, value in body.items() if name in cls.model_fields}


class Completion(Wanted):
    prompt: Text | Tokens | list[Text] | list[Tokens]


class TextPart(BaseModel):
    type: Literal["text"]
    text: Text


class Message(BaseModel):
    role: Text
    content: Text | list[TextPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class Chat(Wanted):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


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
        self.app = application(self.engine, self.meter, menu, key=key, largest=largest)
        self.app.post("/v1/completions")(self.complete)
        self.app.post("/v1/chat/completions")(self.chat)

    async def complete(self, body: Completion, http: Request) -> Response:
        prompts = await asyncio.to_thread(self._tokenized, body.prompt)
        return await self._answer(body, prompts, http, "text_completion", _completed)

    async def chat(self, body: Chat, http: Request) -> Response:
        limit = body.max_completion_tokens or body.max_tokens
        body = body.model_copy(update={"max_tokens": limit})
        prompt = await asyncio.to_thread(self._templated, body.messages)
        return await self._answer(body, [prompt], http, "chat.completion", _chatted)

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
        said = [{"role": message.role, "content": message.text} for message in messages]
        found = self.tokenizer.apply_chat_template(said, add_generation_prompt=True)
        return list(found if isinstance(found, list) else found["input_ids"])

    def _asked(self, body: Wanted, prompt: list[int]) -> Asked:
        drawn = body.temperature is not None and body.temperature > 0
        if not drawn and (body.top_p not in (None, 1) or body.top_k is not None):
            raise SettingError("top_p and top_k choose what is drawn; send a temperature above 0")
        sampling = (
            Sampling(
                do_sample=True,
                temperature=body.temperature or 1.0,
                top_p=body.top_p,
                top_k=body.top_k,
            )
            if drawn
            else Sampling()
        )
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

    async def _answer(
        self, body: Wanted, prompts: list[list[int]], http: Request, kind: str, form: _Form
    ) -> Response:
        asked = [self._asked(body, prompt) for prompt in prompts]
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if any(not stop for stop in stops):
            raise SettingError("an empty stop string would stop every text; leave it out")
        head = {
            "id": f"ed-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": body.model,
        }
        form = _with_ids(form) if body.return_token_ids else form
        parts = _merged([self._spoken(request, stops) for request in asked])
        if body.stream:
            head["object"] = kind if kind == "text_completion" else f"{kind}.chunk"
            first = await anext(parts)  # a refusal is a status code, not half an answer
            usage = body.stream_options is not None and body.stream_options.include_usage
            events = _events(first, parts, head, form, prompts if usage else None)
            return StreamingResponse(events, media_type="text/event-stream")
        said = await _while_connected(http, _collected(parts, len(asked)))
        if said is None:
            return Response(status_code=499)
        choices = [form(i, one, False) for i, one in enumerate(said)]
        usage = _usage(prompts, [one.tokens for one in said])
        return JSONResponse(head | {"choices": choices, "usage": usage})

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
                new = text.add(_without_end(piece), last=piece.finish is not None)
                finish = "stop" if text.stopped else piece.finish
                begins = tokens == len(piece.tokens)
                yield _Spoken(
                    [new],
                    tokens,
                    piece.depth,
                    finish,
                    list(piece.tokens),
                    list(piece.exits),
                    begins,
                )
                if finish is not None:
                    took = time.monotonic() - begin
                    self.meter.ended(took, piece.depth, tokens, finish, first)
                    return


@dataclass(frozen=True)
class _Spoken:
    """What came of one request so far: parts of text, the count of tokens, and the new ones.

    exits: the depth of each of the new ones, if a policy chose it; begins: there were none before.
    """

    text: list[str]
    tokens: int
    depth: int
    finish: str | None
    ids: list[int]
    exits: list[int]
    begins: bool

    @property
    def depths(self) -> dict[str, Any]:
        """How deep it went, as clients are told."""
        return {"depth": self.depth} | ({"exit_depths": self.exits} if self.exits else {})


_Form = Callable[[int, _Spoken, bool], dict[str, Any]]


def _completed(index: int, said: _Spoken, part: bool) -> dict[str, Any]:
    return {
        "index": index,
        "text": "".join(said.text),
        "finish_reason": said.finish,
        "logprobs": None,
        **said.depths,
    }


def _chatted(index: int, said: _Spoken, part: bool) -> dict[str, Any]:
    # Clients put the parts of a stream together, field by field: only the first names the role.
    role = {"role": "assistant"} if said.begins or not part else {}
    return {
        "index": index,
        "delta" if part else "message": role | {"content": "".join(said.text)},
        "finish_reason": said.finish,
        **said.depths,
    }


def _usage(prompts: Sequence[Sequence[int]], tokens: Iterable[int]) -> dict[str, int]:
    read, said = sum(map(len, prompts)), sum(tokens)
    return {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}


def _with_ids(form: _Form) -> _Form:
    return lambda index, said, part: form(index, said, part) | {"token_ids": said.ids}


def _without_end(piece: Piece) -> tuple[int, ...]:
    """The tokens without the one that ended the text."""
    return piece.tokens[:-1] if piece.finish == "stop" else piece.tokens


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


async def _collected(parts: AsyncIterator[tuple[int, _Spoken]], count: int) -> list[_Spoken]:
    said: dict[int, _Spoken] = {}
    async for index, one in parts:
        before = said.get(index)
        said[index] = (
            one
            if before is None
            else replace(
                one,
                text=before.text + one.text,
                ids=before.ids + one.ids,
                exits=before.exits + one.exits,
            )
        )
    return [said[i] for i in range(count)]


async def _events(
    first: tuple[int, _Spoken],
    rest: AsyncGenerator[tuple[int, _Spoken], None],
    head: dict[str, Any],
    form: _Form,
    prompts: Sequence[Sequence[int]] | None,
) -> AsyncGenerator[str, None]:
    """One event for each piece; for given prompts the last one tells the usage."""
    tokens: dict[int, int] = {}

    def event(**content: Any) -> str:
        return f"data: {json.dumps(content)}\n\n"

    def choice(index: int, said: _Spoken) -> str:
        tokens[index] = said.tokens
        return event(**head, choices=[form(index, said, True)])

    async with aclosing(rest):
        yield choice(*first)
        try:
            async for index, said in rest:
                yield choice(index, said)
        except EveryDepthError as error:
            yield event(error=_said(error))
    if prompts is not None:
        yield event(**head, choices=[], usage=_usage(prompts, tokens.values()))
    yield "data: [DONE]\n\n"


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


# -- the application around it ---------------------------------------------------------------------

STATUS: dict[type[EveryDepthError], int] = {
    UnknownModel: 404,
    Failed: 500,
    NonFiniteError: 500,
    Busy: 503,
    Stopped: 503,
}
"""Of errors that are not the client's, or have a code of their own; all others are 400."""
DRAINED = 2**26
"""Bytes of a body too large that are still taken, and dropped: many clients read no answer
before all is sent."""


def application(
    engine: Backend, meter: Meter, menu: Menu, *, key: str | None, largest: int
) -> FastAPI:
    """An application with the common routes, and with keys, limits and error handling for all."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        await asyncio.to_thread(engine.start)
        yield
        await asyncio.to_thread(engine.stop)

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        code = 200 if engine.ready else 503
        return JSONResponse({"ready": engine.ready}, code)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(meter.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/results")
    async def results() -> dict[str, Any]:
        return meter.results().to_json()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": menu.listed()}

    @app.get("/v1/models/{name}")
    async def model(name: str) -> dict[str, Any]:
        found = menu.one(name)
        if found is None:
            raise HTTPException(404, f"no model {name!r} here; /v1/models lists them")
        return found

    @app.exception_handler(EveryDepthError)
    async def refused(_: Request, error: Exception) -> Response:
        status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 400)
        later = {"Retry-After": "1"} if status == 503 else None
        return JSONResponse({"error": _said(error)}, status, later)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = error.errors()[0]
        if found["type"] == "json_invalid":
            at, why = found["loc"][-1], found.get("ctx", {}).get("error", "")
            return _refusal(400, f"the body is not JSON: {why} at character {at}")
        # Behind the field come the types that were tried, which say nothing to a client.
        where = f"{found['loc'][1]}: " if len(found["loc"]) > 1 else ""
        return _refusal(400, where + found["msg"].removeprefix("Value error, "))

    @app.exception_handler(StarletteError)
    async def other(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException | StarletteError)
        return _refusal(error.status_code, str(error.detail))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        # The server's log has the traceback; clients do not get internal details.
        return _refusal(500, "the server failed on this request")

    app.add_middleware(Guard, key=key, largest=largest)
    return app


class Guard:
    """Before anything is read: the key, and the size of what is sent."""

    OPEN = ("/health", "/ready")

    def __init__(self, app: Any, *, key: str | None, largest: int) -> None:
        self.app, self._largest = app, largest
        self._key = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._key is not None and scope["path"] not in self.OPEN:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._key):
                await _refusal(401, "this server needs its key: Authorization: Bearer KEY")(
                    scope, receive, send
                )
                return
        size = headers.get(b"content-length", b"0")
        if not size.isdigit() or int(size) > self._largest:
            await self._too_large(scope, receive, send)
            return
        await self._measured(scope, receive, send)

    async def _measured(self, scope: Any, receive: Any, send: Any) -> None:
        """A body without a declared length is counted while it comes."""
        seen, ended = 0, False

        async def counted() -> Any:
            nonlocal seen, ended
            message = await receive()
            seen += len(message.get("body", b""))
            ended = not message.get("more_body", False)
            # The application hears that nobody is there, and what it then says is not passed on.
            return message if seen <= self._largest else {"type": "http.disconnect"}

        async def passed_on(message: Any) -> None:
            if seen <= self._largest:
                await send(message)

        await self.app(scope, counted, passed_on)
        if seen > self._largest:
            await self._too_large(scope, receive, send, ended=ended)

    async def _too_large(self, scope: Any, receive: Any, send: Any, *, ended: bool = False) -> None:
        dropped = 0
        while not ended and dropped < DRAINED:
            message = await receive()
            dropped += len(message.get("body", b""))
            ended = not message.get("more_body", False)
        refusal = _refusal(413, f"a request may have {self._largest:,} bytes; send less")
        await refusal(scope, receive, send)


def _refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": _said(ValueError(message))}, status)


def _said(error: Exception) -> dict[str, Any]:
    kind = type(error).__name__ if isinstance(error, EveryDepthError) else "InvalidRequestError"
    return {"message": str(error), "type": kind, "code": None}
