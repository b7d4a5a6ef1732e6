"""The browser that pages are tested in."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

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
