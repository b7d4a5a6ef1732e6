"""The server of the playground: for this machine and this page only; makes no requests itself."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from everydepth.app.compare import page
from everydepth.app.guard import Guard
from everydepth.app.shelf import Shelf
from everydepth.app.told import for_browser
from everydepth.errors import EveryDepthError, SettingError

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

T = TypeVar("T")

HOST = "127.0.0.1"
PORT = 7860
PORTS_TRIED = 20

# Packages that are imported on first use, from several threads. Some import one another, and two
# threads that start with different ones would deadlock.
_NEEDED = ("matplotlib.pyplot", "plotly.basedatatypes", "plotly.offline", "sklearn.datasets")


@contextmanager
def own_cache() -> Generator[Path, None, None]:
    """A private temporary folder for Gradio's files."""
    before = os.environ.get("GRADIO_TEMP_DIR")
    with TemporaryDirectory(prefix="everydepth-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        try:
            yield Path(folder)
        finally:
            if before is None:
                del os.environ["GRADIO_TEMP_DIR"]
            else:
                os.environ["GRADIO_TEMP_DIR"] = before


def in_a_loop(make: Callable[[], T]) -> T:
    """Call `make` in an event loop: without one, Gradio opens some and never closes them."""

    async def made() -> T:
        return make()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with closing(asyncio.new_event_loop()) as loop:
            return loop.run_until_complete(made())
    return make()


def bind(host: str, port: int | None) -> socket.socket:
    """A socket on a port, by default the first free one from 7860 up."""
    tried = range(PORT, PORT + PORTS_TRIED) if port is None else (port,)
    why: str | None = None
    for number in tried:
        found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, number))
            found.listen()  # from here on, the port is ours
        except OSError as error:
            found.close()
            why = error.strerror
        else:
            return found
    taken = f"ports {PORT} to {tried[-1]} are" if port is None else f"port {port} is"
    raise SettingError(
        f"{taken} not free on {host} ({why}); free it, or choose another: "
        f"everydepth app --port {(port or PORT) + PORTS_TRIED}"
    )


def server(blocks: Any, shelf: Shelf, found: socket.socket) -> uvicorn.Server:
    """A server for a bound socket; start it with `server(...).run(sockets=[found])`."""
    import uvicorn

    for name in _NEEDED:
        import_module(name)
    host, port = found.getsockname()[:2]
    app = in_a_loop(lambda: application(blocks, shelf, host, port))
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    return uvicorn.Server(config)


def application(blocks: Any, shelf: Shelf, host: str, port: int) -> FastAPI:
    """Gradio's page, the report framed by the Compare tab, and the guard around both."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    import gradio as gr
    from fastapi import FastAPI
    from fastapi.responses import HTMLResponse
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from everydepth.app.build import appearance

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/compare")
    def compare(a: str, b: str) -> HTMLResponse:
        try:
            return HTMLResponse(page(shelf, a, b))
        except EveryDepthError as error:
            return HTMLResponse(f"<p style='font-family:system-ui'>{for_browser(error)}</p>")

    @app.get("/manifest.json")
    def manifest() -> dict[str, str]:
        return {"name": "everydepth"}

    app.add_middleware(Guard, blocks=blocks)
    # Against DNS rebinding: requests under other host names are refused.
    names = ["localhost", "127.0.0.1", "[::1]", host]
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["*"] if _open(host) else names)
    # Before an app is launched, which ours never is, Gradio opens any path that a page names.
    blocks.has_launched = True
    return gr.mount_gradio_app(
        app,
        blocks,
        path="",
        server_name=host,
        server_port=port,
        allowed_paths=[],
        footer_links=[],
        run_history=False,
        show_error=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        **appearance(),
    )


def _open(host: str) -> bool:
    """Whether the user allowed other machines to connect, under any name."""
    return host not in ("127.0.0.1", "localhost", "::1")
