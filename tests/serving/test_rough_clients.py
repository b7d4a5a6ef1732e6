"""Clients that go away, read slowly or come all at once disturb nobody else."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from tests.helpers.talking import Talker
from torch import nn

import everydepth as ed
from everydepth.serving import ServeConfig, Served, application
from everydepth.serving.serve import bound

LONG = "the"
"""A prompt that the model continues for 240 tokens."""


@dataclass(frozen=True)
class Running:
    host: str
    port: int
    client: httpx.Client

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def fact(self, name: str) -> float:
        text = self.client.get(f"{self.url}/metrics").text
        line = next(x for x in text.splitlines() if x.startswith(f"everydepth_engine_{name}{{"))
        return float(line.rsplit(" ", 1)[1])


@pytest.fixture(scope="module")
def running(talker: Talker) -> Iterator[Running]:
    served = Served(name="talker", model=talker.model, tokenizer=talker.tokenizer)
    app = application(served, ServeConfig(places=4, queue=2000))
    sock = bound("127.0.0.1", 0)
    # What a client does not read soon fills the buffers of its connection.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    host, port = sock.getsockname()
    while not server.started:
        time.sleep(0.01)
    with httpx.Client(timeout=60) as client:
        yield Running(host, port, client)
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def wait_for(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def sent(running: Running, **body: Any) -> socket.socket:
    """A request on a connection of its own, of which nothing is read."""
    content = json.dumps({"model": "talker", "prompt": LONG, "max_tokens": 240} | body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    connection = socket.create_connection((running.host, running.port))
    connection.sendall(head.encode() + content)
    return connection


@contextmanager
def held(model: nn.Module) -> Iterator[threading.Event]:
    """No round ends before the event is set, and each is slow afterwards."""
    go_on = threading.Event()

    def wait(*_: Any) -> None:
        go_on.wait(30)
        time.sleep(0.02)

    hook = model.lm_head.register_forward_pre_hook(wait)
    try:
        yield go_on
    finally:
        go_on.set()
        hook.remove()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_place(
    running: Running, talker: Talker, stream: bool
) -> None:
    before = running.fact("cancelled_total")
    with held(talker.model) as go_on:
        with sent(running, stream=stream):
            wait_for(lambda: running.fact("running") == 1)
        go_on.set()
        wait_for(lambda: running.fact("cancelled_total") == before + 1)
    assert running.fact("running") == 0
    assert running.fact("cache_bytes") == 0


def test_a_client_that_does_not_read_holds_up_nobody(running: Running, talker: Talker) -> None:
    said = ed.generate(talker.model, talker.ids("ab"), max_new_tokens=4).tokens[0]
    slow, gone = (sent(running, stream=True, prompt=[LONG] * 4) for _ in range(2))
    body = {"model": "talker", "prompt": "ab", "max_tokens": 4}
    answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=30).json()
    assert answer["choices"][0]["text"] == talker.tokenizer.decode(said, skip_special_tokens=True)
    # The engine finishes these requests, though nobody has read any of it.
    wait_for(lambda: running.fact("running") == running.fact("waiting") == 0)
    assert running.fact("cache_bytes") == 0
    gone.close()
    slow.settimeout(30)
    with slow, slow.makefile("rb") as stream:
        received = list(iter(stream.readline, b"data: [DONE]\n"))
    assert sum(map(len, received)) > 2**17  # more than buffers hold
    events = [json.loads(line[6:]) for line in received if line.startswith(b"data: ")]
    long = ed.generate(talker.model, talker.ids(LONG), max_new_tokens=240).tokens[0]
    text = "".join(e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == 3)
    assert text == talker.tokenizer.decode(long, skip_special_tokens=True)


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_too_large_is_taken_to_its_end_and_answered(
    running: Running, declared: bool
) -> None:
    """Clients like urllib write everything before they read, and fail on a closed connection."""
    size = 2**24
    head = (
        f"content-length: {size}\r\n\r\n"
        if declared
        else f"transfer-encoding: chunked\r\n\r\n{size:x}\r\n"
    )
    start = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection((running.host, running.port), timeout=30) as connection:
        connection.sendall((start + head).encode())
        for _ in range(256):
            connection.sendall(b" " * (size // 256))
        connection.sendall(b"" if declared else b"\r\n0\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_dozens_of_requests_at_once_are_all_answered(running: Running) -> None:
    async def all_of_them() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=80)
        async with httpx.AsyncClient(limits=limits, timeout=60) as client:
            bodies = [
                {"model": f"talker@{1 + i % 4}", "prompt": "x" * (1 + i % 7), "max_tokens": 1}
                for i in range(80)
            ]
            url = f"{running.url}/v1/completions"
            return await asyncio.gather(*(client.post(url, json=body) for body in bodies))

    answers = asyncio.run(all_of_them())
    assert [answer.status_code for answer in answers] == [200] * 80
    depths = [answer.json()["choices"][0]["depth"] for answer in answers]
    assert depths == [1 + i % 4 for i in range(80)]
    assert running.fact("cache_bytes") == 0


@pytest.mark.slow
def test_a_thousand_connections_at_once_are_answered_and_memory_comes_back(
    running: Running,
) -> None:
    memory = psutil.Process().memory_info

    def a_thousand() -> None:
        connections = [sent(running, max_tokens=1, model="talker@1") for _ in range(1000)]
        for connection in connections:
            with connection:
                assert connection.recv(12) == b"HTTP/1.1 200"

    a_thousand()  # what a server keeps for good: buffers, code, histograms
    wait_for(lambda: running.fact("running") == running.fact("waiting") == 0)
    before = memory().rss
    a_thousand()
    wait_for(lambda: running.fact("running") == running.fact("waiting") == 0)
    assert running.fact("cache_bytes") == 0
    gc.collect()
    assert memory().rss < 1.1 * before


def test_a_round_that_fails_costs_its_requests_and_no_others(
    running: Running, talker: Talker
) -> None:
    body = {"model": "talker", "prompt": "ab", "max_tokens": 4}

    def fails(*_: Any) -> None:
        raise RuntimeError("a device is gone")

    hook = talker.model.lm_head.register_forward_pre_hook(fails)
    try:
        broken = httpx.post(f"{running.url}/v1/completions", json=body, timeout=30)
    finally:
        hook.remove()
    assert broken.status_code == 500
    assert "device" not in broken.text  # what is inside is for the log
    again = httpx.post(f"{running.url}/v1/completions", json=body, timeout=30)
    assert again.status_code == 200
