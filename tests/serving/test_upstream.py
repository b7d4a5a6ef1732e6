"""The router, with servers of cut models behind it: real ones, of our own."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from time import sleep

import pytest
import uvicorn
from fastapi.testclient import TestClient
from tests.serving.conftest import END, Talker

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
        ({"depth": 3}, 500, "does not answer"),
    ],
)
def test_what_no_rung_can_do_is_said(
    client: TestClient, asked: dict[str, int], status: int, words: str
) -> None:
    body = {"model": "talker", "prompt": "Once", "max_tokens": 2} | asked
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


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
