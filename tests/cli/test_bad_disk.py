"""Commands that write end with one line where the disk is full or read-only, and leave no half."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.folders import tree
from tests.helpers.training import vit

import everydepth as ed
from everydepth import files
from everydepth.cli import main as main_module

ROWS = ("-d", "digits", "--max-samples", "16")
COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("train", "-m", "model", *ROWS, "--steps", "1", "--batch-size", "8", "-o", "new"),
    "trace": ("trace", "model", *ROWS, "--metrics", "loss", "-o", "new"),
    "profile": ("profile", "model", *ROWS, "--repeats", "1", "-o", "new"),
    "ablate": ("ablate", "model", *ROWS, "-o", "new"),
    "audit": ("audit", "model", *ROWS, "-o", "new"),
    "grow": ("grow", "model", *ROWS, "--batch-size", "4", "--steps", "1", "-o", "new"),
    "export": ("export", "model", "new", "--depth", "1"),
    "report": ("report", "measured", "-o", "page.html"),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model = vit(dropout=0.0)
    model.save_pretrained("model")
    data = ed.data.load_digits("test").first(16)
    ed.trace(model.eval(), data, ["loss"], progress=False).save("measured")
    Path("page.html").write_text("the page of yesterday")
    return tmp_path


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_disk_that_takes_nothing_is_said_in_a_line_and_nothing_is_lost(
    name: str,
    code: int,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(path: Any) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(files, "sync", refused)  # the last step of all that is written
    monkeypatch.setattr(sys, "argv", ["everydepth", *COMMANDS[name]])
    before = tree(home)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main_module.main()
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert stop.value.code == 1
    assert len(said) == 1
    assert any(words in said[0] for words in ("disk is full", os.strerror(code)))
    after = tree(home)
    assert {file: after.get(file) for file in before} == before
    assert not list(home.rglob(".tmp-*"))
