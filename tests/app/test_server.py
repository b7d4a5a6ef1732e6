"""The server and the command: this machine only, clear errors, nothing fetched for anybody."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from tests.helpers.playground import HOSTILE, classifier, save_run
from typer.testing import CliRunner

from everydepth.app import serve as serving
from everydepth.app.server import HOST, PORT, application, bind, in_a_loop
from everydepth.app.shelf import shelf_of
from everydepth.app.told import for_browser
from everydepth.cli.main import build_app
from everydepth.data import load_digits
from everydepth.errors import DataError, SettingError


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    import gradio as gr

    folder = tmp_path_factory.mktemp("runs")
    save_run(folder / "one", classifier(), data=load_digits("test").subset(range(20)))
    (folder / "secret.txt").write_text("secret")

    def make() -> Any:
        with gr.Blocks(analytics_enabled=False) as blocks:
            said = gr.Textbox("hello")
            said.submit(str.upper, said, said)
        return application(blocks, shelf_of(folder), HOST, PORT)

    return TestClient(in_a_loop(make), base_url=f"http://{HOST}:{PORT}")


def test_by_default_only_this_machine_can_connect() -> None:
    with bind(HOST, None) as found:
        assert found.getsockname()[0] == "127.0.0.1"


def test_a_port_in_use_is_said_and_without_a_wish_the_next_is_taken() -> None:
    with bind(HOST, None) as first:
        port = first.getsockname()[1]
        with pytest.raises(
            SettingError, match=rf"port {port} is not free on 127\.0\.0\.1 .*--port"
        ):
            bind(HOST, port)
        with bind(HOST, None) as second:
            assert second.getsockname()[1] != port


def test_every_page_forbids_other_hosts_and_frames(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'self'" in policy
    assert "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_name_that_is_made_to_lead_here_gets_no_answer(client: TestClient) -> None:
    assert client.get("/", headers={"host": "evil.example:7860"}).status_code == 400
    assert client.get("/", headers={"host": "localhost:7860"}).status_code == 200


JOIN = "/gradio_api/queue/join"


def asked(value: Any, **more: Any) -> dict[str, Any]:
    """What a page sends when a visitor changes something."""
    return {"data": [value], "fn_index": 0, "session_hash": "visitor", **more}


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/proxy=http://example.org/",
        "/gradio_api/file=http://example.org/x.png",
        "/gradio_api/file=/etc/passwd",
        f"/gradio_api/file={__file__}",
        "/gradio_api/file=../../../../../../etc/passwd",
        "/gradio_api/file/etc/passwd",
        "/gradio_api/openapi.json",
        "/openapi.json",
        "/gradio_api/vibe-code",
        "/monitoring",
        "/docs",
        f"/static/{'x' * 300}",
        "/gradio_api/heartbeat/a%00b",
        "/gradio_api/heartbeat/a%0Ab",
    ],
)
def test_no_route_but_those_of_the_page_answers(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code in (403, 404)
    assert "root:" not in answer.text


def test_nothing_is_uploaded_to_the_disk(client: TestClient) -> None:
    answer = client.post("/gradio_api/upload", files={"files": ("x.png", b"x" * 1000)})
    assert answer.status_code == 403


@pytest.mark.parametrize(
    "wrapped", [lambda file: file, lambda file: [{"a": file}]], ids=["plain", "nested"]
)
def test_a_visitor_cannot_name_a_file_to_be_opened(
    client: TestClient, tmp_path: Path, wrapped: Any
) -> None:
    secret = tmp_path / "secret.png"
    secret.write_text("secret")
    for meta in ({"_type": "gradio.FileData"}, {}):
        file = {"path": str(secret), "meta": meta}
        answer = client.post(JOIN, json=asked(wrapped(file)))
        assert answer.status_code == 400
        assert str(secret) not in answer.text


@pytest.mark.parametrize("number", [99, -1, "x", None, [0], 0.5, True])
def test_a_function_that_is_not_there_is_the_mistake_of_who_asks(
    client: TestClient, number: Any
) -> None:
    assert client.post(JOIN, json=asked("x") | {"fn_index": number}).status_code == 400
    assert client.post(JOIN, content=b"{").status_code == 400
    assert client.post(JOIN, json=asked("x", session_hash=[3])).status_code == 400
    half = json.dumps(asked("\ud800")).encode()
    assert client.post(JOIN, content=half).status_code == 400
    for none in (b"NaN", b"[Infinity]"):
        body = b'{"fn_index": 0, "session_hash": "visitor", "data": ' + none + b"}"
        assert client.post(JOIN, content=body).status_code == 400


@pytest.mark.parametrize("path", [JOIN, "/gradio_api/cancel", "/gradio_api/reset"])
@pytest.mark.parametrize("body", [b'{"a": NaN}', b'{"a": "\\ud800"}', b"{", b"[" * 5000])
def test_what_an_answer_could_not_repeat_is_a_bad_request(
    path: str, body: bytes, client: TestClient
) -> None:
    kind = {"content-type": "application/json"}
    assert client.post(path, content=body, headers=kind).status_code == 400


def test_other_sites_get_no_answer(client: TestClient) -> None:
    """Also not where no answer is needed to do harm: a form of another site can post here."""
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "http://["):
        assert client.post(JOIN, json=asked("x"), headers={"origin": origin}).status_code == 403
    own = {"origin": f"http://{HOST}:{PORT}"}
    assert client.post(JOIN, json=asked("x"), headers=own).status_code == 200


def test_a_web_socket_is_closed(client: TestClient) -> None:
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/config"):
        pass


def test_what_a_page_sends_is_limited(client: TestClient) -> None:
    assert client.post(JOIN, json=asked("x" * 20_000_000)).status_code == 413

    def unannounced() -> Any:
        yield from (b"x" * 1_000_000 for _ in range(20))

    assert client.post(JOIN, content=unannounced()).status_code == 413


def test_errors_of_others_are_not_shown_and_ours_carry_no_path(client: TestClient) -> None:
    assert client.get("/config").json()["show_error"] is False
    error = DataError(
        "'/home/me/runs/x y/config.json' and C:\\me\\a.json (in /srv/b) are 3 / 4 <b>"
    )
    assert for_browser(error) == "&#x27;config.json&#x27; and a.json (in b) are 3 / 4 &lt;b&gt;"


def test_two_runs_are_served_by_name_and_a_wrong_name_is_shown_as_text(client: TestClient) -> None:
    page = client.get("/compare", params={"a": "one", "b": "one"})
    assert "<title>one</title>" in page.text
    assert "script-src 'sha256-" in page.text
    wrong = client.get("/compare", params={"a": HOSTILE, "b": "../secret.txt"})
    assert "<script>" not in wrong.text
    assert "is not a run here; choose from one" in wrong.text


# -- the command -----------------------------------------------------------------------------------


def run(*words: str) -> Any:
    return CliRunner().invoke(build_app(), ["app", *words])


def test_help_teaches() -> None:
    text = run("--help").output
    for word in (
        "Vision",
        "Language",
        "Surfaces",
        "Compare",
        "RUN or MODEL",
        "--port",
        "no network",
    ):
        assert word in text


def test_without_gradio_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gradio" else found(name)
    )
    with pytest.raises(SettingError, match=r"pip install 'everydepth\[app\]'"):
        serving()


def test_a_folder_that_is_no_run_is_said_before_anything_starts(tmp_path: Path) -> None:
    failed = run(str(tmp_path))
    assert isinstance(failed.exception, DataError)
    assert "neither a run of everydepth nor a model" in str(failed.exception)
    missing = run(str(tmp_path / "nowhere"))
    assert "is not a folder" in str(missing.exception)


def test_the_command_opens_what_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything but the waiting: the server is asked to run on the socket that was announced."""
    seen: list[socket.socket] = []
    monkeypatch.setattr("uvicorn.Server.run", lambda _, sockets: seen.extend(sockets))
    save_run(tmp_path / "mine", classifier(), data=load_digits("test").subset(range(20)))
    done = run(str(tmp_path / "mine"), "--no-browser", "--folder", str(tmp_path / "none"))
    assert done.exception is None, done.output
    assert "the playground is at http://localhost:" in done.output
    assert len(seen) == 1
    assert not (tmp_path / "none").exists()


def test_what_was_kept_for_a_page_is_gone_when_the_server_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []

    def serve(*_: Any, **__: Any) -> None:
        seen.append(Path(os.environ["GRADIO_TEMP_DIR"]))
        (seen[0] / "left").write_text("x")
        assert seen[0].stat().st_mode & 0o077 == 0

    monkeypatch.setenv("GRADIO_TEMP_DIR", "before")
    monkeypatch.setattr("uvicorn.Server.run", serve)
    save_run(tmp_path / "mine", classifier())
    serving([tmp_path / "mine"], folder=tmp_path / "none", browser=False, say=lambda _: None)
    assert len(seen) == 1
    assert not seen[0].exists()
    assert os.environ["GRADIO_TEMP_DIR"] == "before"
