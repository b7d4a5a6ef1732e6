"""The command itself: its help teaches, and an error of ours is a sentence, not a traceback."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

import everydepth
from everydepth.cli import main as main_module
from everydepth.cli.main import build_app
from everydepth.errors import DataError, DepthError, SettingError

ROOT = Path(__file__).parents[2]


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


def _failing(monkeypatch: pytest.MonkeyPatch, error: Exception, *more: str) -> None:
    def fails() -> None:
        raise error

    monkeypatch.setattr(main_module, "COMMANDS", (fails, *main_module.COMMANDS))
    monkeypatch.setattr(sys, "argv", ["everydepth", "fails", *more])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            FileNotFoundError(2, "No such file or directory", "runs/a"),
            "error: the command stopped: No such file or directory (runs/a); it was moved, deleted "
            "or never there: check the path\n",
        ),
        (
            KeyError("depth"),
            "error: KeyError: 'depth'; add --debug for the traceback, and report it if you think "
            "it is a bug\n",
        ),
    ],
)
def test_any_other_error_is_one_line_too(
    error: Exception,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _failing(monkeypatch, error)
    with pytest.raises(SystemExit) as stopped:
        main_module.main()
    assert stopped.value.code == 1
    assert capsys.readouterr().err == words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["trian"],
            "no such command 'trian'. Did you mean 'train', 'trace'? See everydepth --help",
        ),
        (["trace"], "missing argument 'model'; see everydepth trace --help"),
        (["plan", "--parameter", "1"], "no such option: --parameter"),
        (["audit", "m", "-d", "x", "--top", "0"], "invalid value for '--top'"),
        (
            ["train", "-m", "vit-tiny", "-d", "digits", "--blocks", "99999999999"],
            "invalid value for '--blocks': Input should be less than or equal to 1000",
        ),
    ],
)
def test_words_that_make_no_command_are_one_line_too(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["everydepth", *words])
    with pytest.raises(SystemExit) as stopped:
        main_module.main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")
    assert line.endswith(" --help")


def test_a_limit_of_a_config_is_its_own_to_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["everydepth", "plan", "--parameters", "1e9", "--multiple=0"])
    with pytest.raises(SystemExit):
        main_module.main()
    assert capsys.readouterr().err == "error: multiple=0; use a whole number of 1 or more\n"


def test_debug_shows_where_an_error_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    _failing(monkeypatch, KeyError("depth"), "--debug")
    with pytest.raises(KeyError, match="depth"):
        main_module.main()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("- 1\n", "holds a list; write `option: value` lines"),
        ("{{{", "cannot be read as YAML or JSON .*; write one line"),
        ("[" * 20_000, "cannot be read as YAML or JSON .*recursion"),
        ("batch_size: true\n", "batch_size is True, but it is not a flag; give a value"),
        ("c: [0, one]\n", "--c '0,one'; give numbers, separated by commas"),
        ("batches: 3\n", "ablate has no option 'batches'"),
    ],
)
def test_a_file_of_options_that_makes_no_sense_is_refused(
    content: str, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(content)
    command = ["ablate", "nowhere", "--data", "digits", "--config", str(file)]
    with pytest.raises(SettingError, match=words):
        CliRunner().invoke(build_app(), command, catch_exceptions=False)


def test_a_list_in_a_file_of_options_is_several_values(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("c: [0, 0.5]\nlayers: [1, 2]\n")
    command = ["ablate", "nowhere", "--data", "digits", "--config", str(file)]
    with pytest.raises(DataError, match="'nowhere' is neither a local folder nor found"):
        CliRunner().invoke(build_app(), command, catch_exceptions=False)


def _brought(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    points = [
        EntryPoint(name=name, value=value, group="everydepth.commands")
        for name, value in values.items()
    ]
    monkeypatch.setattr(main_module, "entry_points", lambda group: EntryPoints(points))


def test_another_package_brings_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("brought")
    module.greet = lambda: print("hello")  # type: ignore[attr-defined]
    module.greet.__name__ = "greet"
    monkeypatch.setitem(sys.modules, "brought", module)
    _brought(monkeypatch, greet="brought:greet")
    assert CliRunner().invoke(build_app(), ["greet"]).output == "hello\n"


def test_a_command_that_cannot_be_loaded_is_said_and_the_others_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _brought(monkeypatch, absent="nowhere.at.all:absent")
    assert CliRunner().invoke(build_app(), ["--version"]).exit_code == 0
    build_app()
    assert "warning: no command absent from nowhere.at.all:absent" in capsys.readouterr().err


def test_no_package_replaces_a_command_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    _brought(monkeypatch, trace="nowhere.at.all:trace")
    made = [command.callback for command in build_app().registered_commands]
    assert [command.__name__ for command in made] == [c.__name__ for c in main_module.COMMANDS]  # type: ignore[union-attr]


def test_the_papers_bring_claims_and_reproduce() -> None:
    names = {command.callback.__name__ for command in build_app().registered_commands}  # type: ignore[union-attr]
    assert {"claims", "reproduce"} <= names - {c.__name__ for c in main_module.COMMANDS}


def test_the_commands_of_the_papers_can_be_loaded() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = project["entry-points"]["everydepth.commands"]
    for name, value in found.items():
        point = EntryPoint(name=name, value=value, group="everydepth.commands")
        assert point.load().__name__ == name
    assert set(found) == {"claims", "reproduce", "sweep"}
