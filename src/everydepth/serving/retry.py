"""Requests whose replica dies are answered by another one, or told to come again."""

from __future__ import annotations

import json
from typing import Any

from everydepth.serving.guard import described, refusal

TRIES = 2
"""Replicas that one request may use up: the request itself may be what kills them."""
KEPT = 2**25
"""The largest body that is kept for another try, in bytes."""
GONE = "the server that was working on this request has died; send it again"


class Retrying:
    """Around an application that returns without an answer if the replica behind it dies.

    The answer is held back until its first bytes arrive. Until then the request can be sent again;
    an answer that breaks off later ends with an error event if it is a stream of events.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body, answer = _Body(receive), _Answer(send)
        for _ in range(TRIES):
            # The application adds its own headers to the scope.
            await self.app(scope | {"headers": list(scope["headers"])}, body.reader(), answer)
            if answer.begun or body.over:
                break
        if body.disconnected or answer.ended:
            return
        if not answer.begun:
            await refusal(503, GONE, "Stopped")(scope, receive, send)
        elif answer.streams:
            error = json.dumps({"error": described(GONE, "Stopped")})
            event = f"data: {error}\n\ndata: [DONE]\n\n".encode()
            await send({"type": "http.response.body", "body": event})


class _Body:
    """The messages of a client, which can be read again from the first one."""

    def __init__(self, receive: Any) -> None:
        self._receive, self._messages, self._bytes = receive, list[Any](), 0
        self.disconnected = False

    @property
    def over(self) -> bool:
        """Whether it can not be read again, or nobody waits for an answer."""
        return self.disconnected or self._bytes > KEPT

    def reader(self) -> Any:
        seen = 0

        async def read() -> Any:
            nonlocal seen
            if seen < len(self._messages):
                message = self._messages[seen]
            else:
                message = await self._receive()
                self._keep(message)
            seen += 1
            return message

        return read

    def _keep(self, message: Any) -> None:
        self._bytes += len(message.get("body", b""))
        self.disconnected |= message["type"] == "http.disconnect"
        self._messages.append(message if self._bytes <= KEPT else None)


class _Answer:
    """Passes an answer on as soon as a part of its body is there."""

    def __init__(self, send: Any) -> None:
        self._send, self._start = send, dict[str, Any]()
        self.begun = self.ended = False

    @property
    def streams(self) -> bool:
        headers = dict(self._start["headers"])
        return headers.get(b"content-type", b"").startswith(b"text/event-stream")

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        if not self.begun:
            self.begun = True
            await self._send(self._start)
        self.ended = not message.get("more_body", False)
        await self._send(message)
