"""The server: this machine only, this page only, and no request to anywhere else."""

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

# Answers come from several threads, and each of these packages is imported when one first needs it.
# Some import one another, and two threads that begin at different ends wait for each other.
_NEEDED = ("matplotlib.pyplot", "plotly.basedatatypes", "plotly.offline", "sklearn.datasets")


def check_gradio() -> None:
    """An error that says which extra is missing."""
    from importlib.util import find_spec

    if find_spec("gradio") is None:
        raise SettingError(
            "the playground needs gradio, which is not installed; install the extra: "
            "pip install 'everydepth[app]'"
        )


@contextmanager
def own_cache() -> Generator[Path, None, None]:
    """A private folder for what Gradio keeps on disk, removed afterwards."""
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
    """Call something of Gradio: where no event loop runs, it opens some and never closes them."""

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
            found.listen()  # from here on nobody else gets it, and nobody is refused
        except OSError as error:
            found.close()
            why = error.strerror
        else:
            return found
    taken = f"ports {PORT} to {tried[-1]} are" if port is None else f"port {port} is"
    raise SettingError(
        f"{taken} not free on {host} ({why}); stop what is there, or choose another: "
        f"everydepth app --port {(port or PORT) + PORTS_TRIED}"
    )


def server(blocks: Any, shelf: Shelf, found: socket.socket) -> uvicorn.Server:
    """What answers on a bound socket: `server(...).run(sockets=[found])`."""
    import uvicorn

    for name in _NEEDED:
        import_module(name)
    host, port = found.getsockname()[:2]
    app = in_a_loop(lambda: application(blocks, shelf, host, port))
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    return uvicorn.Server(config)


def application(blocks: Any, shelf: Shelf, host: str, port: int) -> FastAPI:
    """The pages of Gradio, the report that Compare frames, and the headers that shut both in."""
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
    # Another site whose name is made to lead here (DNS rebinding) does not get an answer.
    names = ["localhost", "127.0.0.1", "[::1]", host]
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["*"] if _open(host) else names)
    # Until an app is launched, which ours never is, Gradio opens any path that a page names.
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
    """Whether the user chose to be reached by other machines, under any name."""
    return host not in ("127.0.0.1", "localhost", "::1")
