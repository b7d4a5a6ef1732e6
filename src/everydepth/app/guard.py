"""Middleware that passes only what our page needs on to Gradio.

Gradio has about sixty routes, which fetch URLs, accept uploads, serve files or change code. Our
page needs a dozen; all others are blocked, including those that later versions may add. Requests
that name a file are blocked, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

LONGEST_BODY = 12 * 2**20  # bytes: an image of 8 MiB in base64, and what is sent with it
LONGEST_PATH = 200  # characters; longer names could make file systems fail

# Gradio's page builds functions from strings, so scripts cannot be restricted further; but nothing
# can be fetched from, sent to, or framed by another site.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self' data: blob:; worker-src 'self' blob:; frame-src 'self'; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
)
_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
_JOIN = "/gradio_api/queue/join"
_READ = re.compile(
    r"/|/(compare|config/?|manifest\.json|favicon\.ico|robots\.txt|theme\.css)|"
    r"/(assets|static|svelte)/.*|"
    r"/gradio_api/(info/?|app_id/?|theme\.css|startup-events|queue/data|heartbeat/[^/]*)"
)
_SENT = re.compile(r"/gradio_api/(queue/join|cancel|reset/?)")


class Guard:
    """Adds headers to every answer, and refuses requests that our page would not make."""

    def __init__(self, app: Any, blocks: Any) -> None:
        self.app = app
        self.blocks = blocks

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # our page opens no web sockets
            await send({"type": "websocket.close"})
            return
        status = _refused(scope)
        if status is None and scope["method"] == "POST":
            body = await _body(receive)
            if body is None:
                status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            elif not self._is_sound(body, scope["path"]):
                status = HTTPStatus.BAD_REQUEST
            else:
                receive = _again(body, receive)
        if status is not None:
            head = {"type": "http.response.start", "status": int(status), "headers": [*_HEADERS]}
            await send(head)
            await send({"type": "http.response.body", "body": status.phrase.encode()})
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                # The framed report has its own, stricter policy.
                added = _HEADERS if scope["path"] != "/compare" else _HEADERS[1:]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await self.app(scope, receive, with_headers)

    def _is_sound(self, body: bytes, path: str) -> bool:
        """Whether what asks for a function asks for one of this visitor's page, and for no file."""
        from gradio.route_utils import get_fn

        try:
            asked = json.loads(body)
            # Gradio could not repeat NaN, infinity or lone surrogates in an answer.
            json.dumps(asked, ensure_ascii=False, allow_nan=False).encode()
            if path != _JOIN:
                return True
            number, visitor = asked["fn_index"], asked.get("session_hash")
            whole = type(number) is int and isinstance(visitor, str | None)
            if not whole or any(_is_file(part) for part in _parts(asked)):
                return False
            get_fn(self.blocks, None, SimpleNamespace(fn_index=number, session_hash=visitor))  # pyright: ignore[reportArgumentType]
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
            return False
        return True


def _refused(scope: Any) -> HTTPStatus | None:
    """The status of a request that is refused by its headers, or None."""
    known, path = _READ if scope["method"] in ("GET", "HEAD") else _SENT, scope["path"]
    if len(path) > LONGEST_PATH or not path.isprintable() or not known.fullmatch(path):
        return HTTPStatus.FORBIDDEN
    headers: dict[bytes, bytes] = dict(scope["headers"])
    origin, host = headers.get(b"origin"), headers.get(b"host", b"")
    if origin is not None and origin not in (b"http://" + host, b"https://" + host):
        return HTTPStatus.FORBIDDEN
    if int(headers.get(b"content-length", b"0") or 0) > LONGEST_BODY:
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    return None


async def _body(receive: Any) -> bytes | None:
    """The body of a request; None as soon as it is too long."""
    parts: list[bytes] = []
    length, more = 0, True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        length += len(parts[-1])
        if length > LONGEST_BODY:
            return None
        more = message.get("more_body", False)
    return b"".join(parts)


def _again(body: bytes, receive: Any) -> Any:
    """A `receive` that returns the body again."""
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Any:
        return unread.pop() if unread else await receive()

    return replayed


def _parts(tree: Any) -> Iterator[Any]:
    yield tree
    below = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    for part in below:
        yield from _parts(part)


def _is_file(part: Any) -> bool:
    """Whether Gradio would open a file: it copies any path that comes with a `meta`."""
    return isinstance(part, dict) and "path" in part
