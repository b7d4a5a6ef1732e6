"""What stands before the routes: the key, and the size of what is sent."""

from __future__ import annotations

import hmac
from typing import Any

from starlette.responses import JSONResponse

OPEN = ("/health", "/ready")
"""Paths that need no key."""
DRAINED = 2**26
"""Bytes of an oversized body that are read and dropped: many clients read no answer before they
have sent everything."""


class Guard:
    """ASGI middleware that refuses clients without the key, and bodies over `largest` bytes."""

    def __init__(self, app: Any, *, key: str | None, largest: int) -> None:
        self.app, self._largest = app, largest
        self._key = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given, size = headers.get(b"authorization", b""), headers.get(b"content-length", b"0")
        closed = self._key is not None and scope["path"] not in OPEN
        if closed and not hmac.compare_digest(given, self._key or b""):
            refused = refusal(401, "this server needs its key: Authorization: Bearer KEY")
            await refused(scope, receive, send)
        elif not size.isdigit() or int(size) > self._largest:
            await self._too_large(scope, receive, send)
        else:
            await self._measured(scope, receive, send)

    async def _measured(self, scope: Any, receive: Any, send: Any) -> None:
        """Count the bytes as they arrive: a body need not declare its length."""
        seen, ended = 0, False

        async def counted() -> Any:
            nonlocal seen, ended
            message = await receive()
            seen += len(message.get("body", b""))
            ended = not message.get("more_body", False)
            # The application is told that the client is gone, and its answer is dropped.
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
        refused = refusal(413, f"a request may have {self._largest:,} bytes; send less")
        await refused(scope, receive, send)


def refusal(status: int, message: str, kind: str = "InvalidRequestError") -> JSONResponse:
    """An error in OpenAI's format; every 503 tells the client to retry."""
    later = {"Retry-After": "1"} if status == 503 else None
    return JSONResponse({"error": described(message, kind)}, status, later)


def described(message: str, kind: str) -> dict[str, Any]:
    return {"message": message, "type": kind, "code": None}
