"""The browser that pages are tested in, and the line they come through."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def browser_path() -> str:
    found = os.environ.get("EVERYDEPTH_CHROME") or next(filter(None, map(shutil.which, NAMES)), "")
    if not found:
        pytest.fail(
            f"no browser: none of {', '.join(NAMES)} is on the path; install one (Debian and "
            "Ubuntu: apt-get install chromium), or set EVERYDEPTH_CHROME to its path"
        )
    return found


@contextmanager
def launched(*, webgl: bool = False) -> Iterator[Browser]:
    """webgl: compute it in software, which a machine without a graphics card needs for surfaces."""
    drawing = ("--use-angle=swiftshader", "--enable-unsafe-swiftshader")
    flags = [*FLAGS, *(drawing if webgl else ("--disable-gpu",))]
    path = browser_path()
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


class Line(SimpleHTTPRequestHandler):
    """A line on which each file of the network waits until the test lets it through."""

    passing: ClassVar[dict[str, threading.Event]] = {}

    def log_message(self, *_: Any) -> None:
        """Tests print nothing."""

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if name.endswith(".onnx"):
            self.passing[name].wait(timeout=120)
        super().do_GET()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Line, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/index.html"
    finally:
        server.shutdown()
        server.server_close()


def empty_runtime(folder: Path) -> Path:
    """In place of the packages a page runs on, which only a browser needs."""
    folder.mkdir()
    names = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm", "tokenizers.min.mjs")
    for name in names:
        (folder / name).write_text(name)
    return folder
