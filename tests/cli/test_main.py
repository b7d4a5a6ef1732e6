"""The command itself: its help teaches, and an error of ours is a sentence, not a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import everydepth
from everydepth.cli import main as main_module
from everydepth.cli.main import build_app
from everydepth.errors import DepthError


def test_help_gives_a_promise_every_command_and_an_example() -> None:
    output = CliRunner().invoke(build_app(), ["--help"], env={"COLUMNS": "120"}).output
    assert "train once, use N models" in output
    assert "everydepth train -m vit-tiny -d digits" in output
    for command in main_module.COMMANDS:
        assert f" {command.__name__} " in output


def test_no_arguments_show_the_help() -> None:
    assert "train once" in CliRunner().invoke(build_app(), [], env={"COLUMNS": "120"}).output


def test_the_version_is_the_package_version() -> None:
    result = CliRunner().invoke(build_app(), ["--version"])
    assert result.output == f"everydepth {everydepth.__version__}\n"


def test_commands_import_torch_only_when_they_run() -> None:
    # The package is put in place without running its __init__, to see the commands by themselves.
    script = """
import importlib.util, sys
spec = importlib.util.find_spec("everydepth")
sys.modules["everydepth"] = importlib.util.module_from_spec(spec)
import everydepth.cli.main
everydepth.cli.main.build_app()
print("torch" in sys.modules)
"""
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert finished.stdout == "False\n"


def test_an_error_of_ours_is_one_line_and_exit_code_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise DepthError("depth 14, but this network has 12 blocks; use 0 to 12")

    monkeypatch.setattr(main_module, "COMMANDS", (fails, *main_module.COMMANDS))
    monkeypatch.setattr(sys, "argv", ["everydepth", "fails"])
    with pytest.raises(SystemExit) as stopped:
        main_module.main()
    assert stopped.value.code == 1
    expected = "error: depth 14, but this network has 12 blocks; use 0 to 12\n"
    assert capsys.readouterr().err == expected
