"""The router, with servers of cut models behind it: real ones, of our own."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread
from time import sleep

import pytest
import uvicorn
from fastapi.testclient import TestClient
from tests.helpers.talking import END, Talker

import everydepth as ed
from everydepth.errors import RunError, SettingError
from everydepth.serving import Menu, ServeConfig, Served, application
from everydepth.serving.completions import Server
from everydepth.serving.serve import bound
from everydepth.serving.upstream import Rung, Upstream
from everydepth.serving.vllm import Vllm


@contextmanager
def served(talker: Talker, depth: int) -> Iterator[Rung]:
    model = ed.at_depth(talker.model, depth)
    app = application(Served(name=f"rung-{depth}", model=model, tokenizer=talker.tokenizer))
    sock = bound("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while not server.started:
        sleep(0.01)
    yield Rung(f"http://127.0.0.1:{sock.getsockname()[1]}", f"rung-{depth}")
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="module")
def client(talker: Talker) -> Iterator[TestClient]:
    stream = ed.as_stream(talker.model)
    with ExitStack() as stack:
        rungs = {depth: stack.enter_context(served(talker, depth)) for depth in (2, 4)}
        rungs[3] = Rung("http://127.0.0.1:9", "nobody")
        server = Server(
            Menu(name="talker", depth=4, rungs=(2, 3, 4)),
            Upstream(stream, rungs),
            talker.tokenizer,
            ends=(END,),
        )
        yield stack.enter_context(TestClient(server.app))


@pytest.mark.parametrize("depth", [2, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_a_rung_gives_the_text_of_the_cut_model(
    client: TestClient, talker: Talker, depth: int, stream: bool
) -> None:
    body = {"model": f"talker@{depth}", "prompt": "Once", "max_tokens": 8, "stream": stream}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    said = ed.generate(talker.model, talker.ids("Once"), max_new_tokens=8, depth=depth).tokens[0]
    text = talker.tokenizer.decode(said, skip_special_tokens=True)
    if not stream:
        assert answer.json()["choices"][0]["text"] == text
        assert answer.json()["choices"][0]["depth"] == depth


@pytest.mark.parametrize(
    ("asked", "status", "words"),
    [
        ({"depth": 1}, 400, "this server has 2, 3, 4"),
        ({"depth": 4, "draft_depth": 2}, 400, "leave it out"),
        ({"depth": 3}, 503, "server of nobody does not answer (ConnectError); send the request"),
    ],
)
def test_what_no_rung_can_do_is_said(
    client: TestClient, asked: dict[str, int], status: int, words: str
) -> None:
    body = {"model": "talker", "prompt": "Once", "max_tokens": 2} | asked
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == status
    assert answer.headers.get("retry-after") == ("1" if status == 503 else None)
    assert words in answer.json()["error"]["message"]
    others = {"model": "talker@4", "prompt": "Once", "max_tokens": 2}
    assert client.post("/v1/completions", json=others).status_code == 200


ANSWERED = b"HTTP/1.1 200 x\r\n\r\n"
EVENT = b'data: {"choices": [{"token_ids": [70], "finish_reason": null}]}\n\n'


@pytest.mark.parametrize(
    ("reply", "status", "words"),
    [
        (b"", 503, "server of engine does not answer (RemoteProtocolError)"),
        (b"HTTP/1.1 503 x\r\ncontent-length: 4\r\n\r\nfull", 503, "engine answers 503: full"),
        (b"HTTP/1.1 429 x\r\ncontent-length: 4\r\n\r\nfull", 503, "engine answers 429: full"),
        (b"HTTP/1.1 500 x\r\ncontent-length: 3\r\n\r\nbug", 500, "engine answers 500: bug"),
        (b"HTTP/1.1 200 x\r\ncontent-length: 999\r\n\r\n" + EVENT, 503, "does not answer"),
        (ANSWERED, 503, "the answer of engine broke off; send the request again"),
        (ANSWERED + EVENT, 503, "the answer of engine broke off; send the request again"),
        (ANSWERED + b"<html>", 500, "the answer of engine cannot be read (JSONDecodeError); check"),
        (ANSWERED + b"data: \xff\xff\n\n", 500, "the answer of engine cannot be read"),
        (ANSWERED + b'data: {"choices": []}\n\n', 500, "cannot be read (IndexError)"),
        (ANSWERED + b"data: 7\n\n", 500, "cannot be read (TypeError)"),
        (ANSWERED + EVENT + b'data: {"choices": []}\n\n', 500, "cannot be read (IndexError)"),
    ],
)
def test_an_engine_that_dies_or_refuses_is_told_from_one_that_fails(
    talker: Talker, reply: bytes, status: int, words: str
) -> None:
    with replying(reply) as url:
        engine = Upstream(ed.as_stream(talker.model), {4: Rung(url, "engine")})
        server = Server(Menu(name="talker", depth=4, rungs=(4,)), engine, talker.tokenizer)
        with TestClient(server.app) as client:
            body = {"model": "talker", "prompt": "Once", "max_tokens": 2}
            answer = client.post("/v1/completions", json=body)
            assert (answer.status_code, "retry-after" in answer.headers) == (status, status == 503)
            assert words in answer.json()["error"]["message"]
            streamed = client.post("/v1/completions", json=body | {"stream": True})
            begun = EVENT in reply
            assert streamed.status_code == (200 if begun else status)
            assert words in streamed.text
            assert engine.facts["running"] == 0


@contextmanager
def replying(reply: bytes) -> Iterator[str]:
    """A server that reads a request, sends this, and closes the connection."""

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(2**16)
            self.request.sendall(reply)

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(20)


def test_a_missing_engine_says_how_to_install_it(talker: Talker) -> None:
    what = Served(name="talker", model=talker.model, tokenizer=talker.tokenizer)
    with pytest.raises(SettingError, match="install vLLM in its own environment"):
        application(what, ServeConfig(engine="vllm", vllm="no-such-program"))
    with pytest.raises(SettingError, match="--rungs 9"):
        application(what, ServeConfig(engine="vllm", rungs="9"))


def test_an_engine_that_does_not_start_is_ended_and_quoted(talker: Talker, tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no device')\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    engine = Vllm(ed.as_stream(talker.model), [2, 4], talker.tokenizer, program=str(program))
    assert [rung.draft for rung in engine.rungs.values()] == [None, 2]
    with pytest.raises(RunError, match="no device"):
        engine.start()
    assert not engine.ready
    assert not [p for p in os.listdir(tmp_path) if p != "vllm"]
