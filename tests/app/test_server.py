"""The server and the command: this machine only, clear errors, nothing fetched for anybody."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.helpers.playground import HOSTILE, classifier, save_run
from typer.testing import CliRunner

from everydepth.app import serve as serving
from everydepth.app.server import HOST, PORT, application, bind, in_a_loop
from everydepth.app.shelf import shelf_of
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
            gr.Markdown("hello")
        return application(blocks, shelf_of(folder), HOST, PORT)

    return TestClient(in_a_loop(make), base_url=f"http://{HOST}:{PORT}")


def test_by_default_only_this_machine_can_connect() -> None:
    with bind(HOST, None) as found:
        assert found.getsockname()[0] == "127.0.0.1"


def test_a_port_in_use_is_said_and_without_a_wish_the_next_is_taken() -> None:
    with bind(HOST, None) as first:
        port = first.getsockname()[1]
        with pytest.raises(SettingError, match=rf"port {port} of 127\.0\.0\.1 can be had .*--port"):
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


def test_no_address_is_fetched_and_no_file_of_the_disk_is_served(client: TestClient) -> None:
    for path in (
        "/gradio_api/proxy=http://example.org/",
        "/gradio_api/file=http://example.org/x.png",
    ):
        assert client.get(path).status_code == 403
    for path in ("/etc/passwd", str(Path(__file__)), "../../../../../../etc/passwd"):
        assert client.get(f"/gradio_api/file={path}").status_code in (403, 404)


def test_two_runs_are_served_by_name_and_a_wrong_name_is_shown_as_text(client: TestClient) -> None:
    page = client.get("/compare", params={"a": "one", "b": "one"})
    assert "<title>one</title>" in page.text
    assert "script-src 'sha256-" in page.text
    wrong = client.get("/compare", params={"a": HOSTILE, "b": "../secret.txt"})
    assert "<script>" not in wrong.text
    assert "is not a run here; choose from one" in wrong.text


def test_uploads_are_limited(client: TestClient) -> None:
    small = client.post("/gradio_api/upload", files={"files": ("x.png", b"x" * 1000)})
    assert small.status_code == 200
    large = client.post("/gradio_api/upload", files={"files": ("x.png", b"x" * 9_000_000)})
    assert large.status_code == 413


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
