"""The Server tab shows whatever Results an address publishes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from tests.helpers.playground import demo_folder

from everydepth.app import live
from everydepth.app.build import build
from everydepth.app.server import in_a_loop
from everydepth.app.shelf import shelf_of
from everydepth.errors import DataError
from everydepth.results import Results, curve, named, scalars


@contextmanager
def publishing(content: bytes, status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            good = self.path == "/v1/results"
            self.send_response(status if good else 404)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def measurement() -> Results:
    return Results(
        results=named(
            scalars("weather", {"degrees": 21.5, "wind": 3.0}, title="weather", about="Now."),
            curve("rain", [1, 2, 3], [0.5, float("nan"), 2.0], axis="day", title="rain"),
        ),
        kind="forecast",
    )


@pytest.mark.parametrize("end", ["", "/", "/v1"])
def test_what_is_published_arrives_as_it_was(end: str) -> None:
    sent = measurement()
    with publishing(json.dumps(sent.to_json()).encode()) as address:
        found = live.published(address + end)
    assert found.kind == "forecast"
    assert float(found.result("weather").arrays["degrees"]) == 21.5
    np.testing.assert_array_equal(found["rain"].mask, [False, True, False])
    assert found.table("rain").cells == sent.table("rain").cells


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"{", 200, "JSON"),
        (b"[]", 200, "not complete results"),
        (b'{"format": 99}', 200, "format 99"),
        (b'{"format": 1, "kind": "x", "about": {}, "results": [{}]}', 200, "not complete results"),
        (b"", 401, "EVERYDEPTH_API_KEY"),
        (b"", 500, "answers 500"),
        (b" " * (live.LARGEST + 1), 200, "more than"),
    ],
)
def test_what_is_no_results_is_said(content: bytes, status: int, words: str) -> None:
    with publishing(content, status) as address, pytest.raises(DataError, match=words):
        live.published(address)


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:9", "http://", "nowhere", f"http://{'x' * 99}"]
)
def test_an_address_where_nobody_answers_is_said(address: str) -> None:
    with pytest.raises(DataError, match="does not answer"):
        live.published(address)


def test_the_tab_is_there_if_an_address_is_given(tmp_path: Path) -> None:
    shelf = shelf_of(demo_folder(tmp_path))
    for address in (None, "http://127.0.0.1:9"):
        blocks = in_a_loop(lambda where=address: build(shelf, server=where))
        labels = [getattr(block, "label", None) for block in blocks.blocks.values()]
        assert ("Server" in labels) == (address is not None)
