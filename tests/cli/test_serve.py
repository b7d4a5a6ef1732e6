"""`everydepth serve`: the command itself, in a process of its own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import torch
from tests.helpers.talking import Talker, talker  # noqa: F401 - a fixture
from typer.testing import CliRunner

import everydepth as ed
from everydepth.cli.main import build_app


def saved(talker: Talker, folder: Path) -> Path:  # noqa: F811
    talker.model.save_pretrained(folder)
    talker.tokenizer.save_pretrained(folder)
    return folder


def test_the_command_answers_and_ends_with_a_signal(talker: Talker, tmp_path: Path) -> None:  # noqa: F811
    folder = saved(talker, tmp_path / "tiny")
    command = [sys.executable, "-u", "-m", "everydepth", "serve", str(folder), "--port", "0"]
    # Whoever runs the tests in the background may have them ignore Ctrl-C: not so the server.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heard) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"tiny at (http://127.0.0.1:\d+)/v1", said)
        assert found, said
        body = {"model": "tiny@2", "prompt": "Once", "max_tokens": 4}
        answer = httpx.post(f"{found[1]}/v1/completions", json=body, timeout=60).json()
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130  # as a shell says that Ctrl-C ended it
    alone = ed.generate(talker.model, talker.ids("Once"), max_new_tokens=4, depth=2)
    text = talker.tokenizer.decode(alone.tokens[0], skip_special_tokens=True)
    assert answer["choices"][0]["text"] == text


def test_a_load_is_simulated_from_a_profile(talker: Talker, tmp_path: Path) -> None:  # noqa: F811
    folder = saved(talker, tmp_path / "tiny")
    rows = [{"input_ids": torch.tensor([[3, 4, 5, 6]] * 2)}]
    profile = ed.profile(talker.model, rows, repeats=1, batch_size=2, progress=False)
    profile.save(tmp_path / "profile")
    load = [{"at": i / 100, "prompt": 4, "tokens": 8} for i in range(10)]
    (tmp_path / "load.json").write_text(json.dumps(load))
    told = ["--profile", str(tmp_path / "profile"), "--target", "5"]
    asked = ["serve", str(folder), "--simulate", str(tmp_path / "load.json")]
    done = CliRunner().invoke(build_app(), [*asked, *told], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "p95" in done.output
    refused = CliRunner().invoke(build_app(), asked)
    assert "--profile" in str(refused.exception)
