"""Whatever words a command is given, it does its work or says in a line why not."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import strategies as st
from tests.fuzz.budget import fuzzed
from tests.fuzz.watching import unchanged
from tests.helpers.training import vit
from typer.testing import CliRunner

from everydepth.cli.main import build_app
from everydepth.errors import EveryDepthError

COMMANDS: dict[str, Any] = typer.main.get_group(build_app()).commands  # pyright: ignore[reportAttributeAccessIssue]
ODD = (
    "", "x", "0", "1", "2", "-1", "1.5", "nan", "inf", "-inf", "1e400", "1e-300", "9" * 30, "1,2",
    "1,,2", "a,b", "none", "all", "last", "true", "../..", "x" * 300, "ünï", "{}", "[1", "a=b",
    "=", "model", "taken", "nowhere/deep", "taken/thesis.tex", "cpu", "cuda:99", "digits", "train",
)  # fmt: skip
# By the name of an option or argument, of whatever command: what it needs, small.
RIGHT: dict[str, str] = {
    "model": "model", "models": "model", "data": "digits", "run": "new", "runs": "taken",
    "out": "new", "directory": "new", "target": "new", "output": "new", "recipe": "tracing_table1",
    "prompt": "ab", "sources": "model", "depth": "1",
}  # fmt: skip
SMALL: dict[str, str] = {
    "max_samples": "8", "steps": "1", "batch_size": "4", "repeats": "1", "rounds": "1",
    "max_new_tokens": "2", "max_tokens": "2", "blocks": "2", "seeds": "1", "max_length": "8",
}  # fmt: skip
NO_WORK = {"dry_run"}  # what would take minutes is only planned


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    vit(dropout=0.0).save_pretrained(folder / "model")
    (folder / "taken").mkdir()
    (folder / "taken" / "thesis.tex").write_text("years of work")
    return folder


def words(command: Any) -> st.SearchStrategy[list[str]]:
    """A right command line, some of whose words are replaced, left out or added."""
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    known = {p.name for p in command.params}

    @st.composite
    def drawn(draw: st.DrawFn) -> list[str]:
        odd = st.sampled_from(ODD)
        changed = set(draw(st.lists(st.sampled_from(sorted(known)), max_size=3)))
        line: list[str] = []
        for argument in arguments:
            right = RIGHT.get(argument.name, "x")
            line.append(draw(odd) if argument.name in changed else right)
        for option in options:
            flag = option.opts[0]
            if option.is_flag:
                if option.name in changed or option.name in NO_WORK:
                    line.append(draw(st.sampled_from([flag, *option.secondary_opts])))
            elif option.name in changed:
                line += [flag, draw(odd)]
            elif option.required or option.name in SMALL:
                line += [flag, SMALL.get(option.name) or RIGHT.get(option.name, "x")]
        # A word that begins with a dash is an option: as in a shell, it may stand anywhere.
        return line

    return drawn()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_works_or_says_why_not(
    name: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    monkeypatch.setattr("everydepth.app.serve", lambda *_, **__: None)
    # A cluster of Ray takes a minute to start, and waits for a signal.
    monkeypatch.setattr("everydepth.cli.serve._replicated", lambda *_: None)
    app = build_app()

    def check(line: list[str]) -> None:
        with unchanged(folder=home / "taken"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            done = CliRunner().invoke(app, [name, *line], env={"COLUMNS": "100", "TERM": "dumb"})
        for entry in home.iterdir():
            if entry.name not in ("model", "taken"):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        error = done.exception
        # What the system refuses is put into words at the top of the command line.
        if error is not None and not isinstance(error, SystemExit | EveryDepthError | OSError):
            raise error

    fuzzed(words(COMMANDS[name]), check, examples=2)
