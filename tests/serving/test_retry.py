"""Requests whose replica dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.testclient import TestClient

from everydepth.serving import retry
from everydepth.serving.retry import Retrying


class Dying:
    """As Ray's proxy behaves when replicas die: it returns, and nothing more is sent.

    lives: for each try, the number of messages that its replica still sends; None for all.
    """

    def __init__(self, answer: Callable[[bytes], Any], *lives: int | None) -> None:
        self._answer, self._lives = answer, iter(lives)
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope["headers"].append((b"x-request-id", b"1"))
        body = await Request(scope, receive).body()
        self.bodies.append(body)
        left = next(self._lives)

        async def until_death(message: Any) -> None:
            nonlocal left
            if left is not None:
                left -= 1
                if left < 0:
                    return
            await send(message)

        await self._answer(body)(scope, receive, until_death)


def echo(body: bytes) -> JSONResponse:
    return JSONResponse({"said": body.decode()})


def streamed(body: bytes) -> StreamingResponse:
    def events() -> Iterator[str]:
        yield "data: 1\n\n"
        yield "data: 2\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


@pytest.mark.parametrize("sent", [0, 1])
def test_a_request_whose_replica_dies_is_answered_by_another(sent: int) -> None:
    app = Dying(echo, sent, None)  # with 1, it dies after the head of the answer
    answer = TestClient(Retrying(app)).post("/", content=b"hello")
    assert (answer.status_code, answer.json()) == (200, {"said": "hello"})
    assert app.bodies == [b"hello", b"hello"]


def test_a_request_whose_replicas_die_is_told_to_come_again() -> None:
    app = Dying(echo, 0, 0, None)
    answer = TestClient(Retrying(app)).post("/", content=b"hello")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "has died; send it again" in answer.json()["error"]["message"]
    assert len(app.bodies) == 2


def test_a_body_too_large_to_keep_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "KEPT", 4)
    app = Dying(echo, 0, None)
    assert TestClient(Retrying(app)).post("/", content=b"hello").status_code == 503
    assert len(app.bodies) == 1


def test_a_stream_that_breaks_off_ends_with_an_error_event() -> None:
    app = Dying(streamed, 2, None)  # the head and one event
    answer = TestClient(Retrying(app)).post("/", content=b"hello")
    assert answer.status_code == 200
    first, error, done = answer.text.strip().split("\n\n")
    assert (first, done) == ("data: 1", "data: [DONE]")
    assert "has died; send it again" in error
    assert len(app.bodies) == 1
    whole = TestClient(Retrying(Dying(streamed, None))).post("/", content=b"hello")
    assert whole.text == "data: 1\n\ndata: 2\n\n"


def test_a_client_that_is_gone_is_not_answered_again() -> None:
    tries, sent = list[int](), list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        tries.append(1)
        while (await receive())["type"] != "http.disconnect":
            pass

    messages = iter([{"type": "http.request", "body": b""}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Retrying(app)({"type": "http", "headers": []}, receive, send))
    assert (len(tries), sent) == (1, [])
