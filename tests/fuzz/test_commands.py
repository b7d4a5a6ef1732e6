"""Whatever words a command is given, it does its work or says in a line why not."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from hypothesis import strategies as st
from tests.fuzz.budget import fuzzed
from tests.fuzz.values import writing
from tests.fuzz.watching import empty, tree, unchanged
from tests.helpers.tokenizing import byte_level
from tests.helpers.training import digits, vit
from typer.testing import CliRunner

import everydepth as ed
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
    **dict.fromkeys(("model", "models", "sources"), "model"),
    **dict.fromkeys(("run", "out", "directory", "target", "output", "record", "docs"), "new"),
    **dict.fromkeys(("depth", "draft_depth", "keep", "blocks", "layers", "balcony", "lora"), "1"),
    **dict.fromkeys(("split", "valid_split", "test_split"), "test"),
    **dict.fromkeys(("policy", "certificate"), "policy.json"),
    **dict.fromkeys(("seed", "top_k", "seeds", "steps", "epochs", "max_depth", "top"), "2"),
    **dict.fromkeys(("top_p", "temperature", "alpha", "confidence", "stop_below"), "0.5"),
    **dict.fromkeys(("recipe", "name"), "progressive_table4"),
    "data": "digits", "runs": "finished",
    "prompt": "ab", "profile": "profile", "metrics": "loss,accuracy", "c": "0.5,1",
    "depths": "1,2", "widths": "8", "simulate": "load.json", "points": "points.csv",
    "objective": "lpa", "task": "classification", "preset": "smoke", "device": "cpu",
    "format": "hf", "parameters": "1e6", "label_smoothing": "0.1", "trackers": "csv",
}  # fmt: skip
SMALL: dict[str, str] = {
    "max_samples": "8", "steps": "1", "batch_size": "4", "repeats": "1", "rounds": "1",
    "max_new_tokens": "2", "max_tokens": "2", "blocks": "2", "seeds": "1", "max_length": "8",
}  # fmt: skip
NO_WORK = {"dry_run", "dry"}  # what would take minutes is only planned
SLOW = {"ray", "processes", "vllm", "llama"}  # choices of tests of their own
DRAWS = ("reproduce", "docs")  # judges and draws again whatever this checkout has recorded
# A file of options may hold any YAML.
IN_A_FILE: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 10**30, float("nan"), "", "x", [], [1, 2], [[1]], ["a"], {}, {"a": 1},
    [None], "1", "1,2",
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    model = vit(dropout=0.0)
    model.save_pretrained(folder / "model")
    seen: dict[str, Any] = {"progress": False}
    ed.fit(ed.EveryDepth(model, ed.lpa()), digits(8), steps=1, run=folder / "finished", **seen)
    ed.profile(model, digits(8), repeats=1, **seen).save(folder / "profile")
    ed.calibrate(model, digits(40), risk=0.9, **seen).save(folder / "policy.json")
    world = writing()
    world.model.resize_token_embeddings(len(byte_level()))  # pyright: ignore[reportCallIssue]
    world.model.save_pretrained(folder / "writer")  # pyright: ignore[reportCallIssue]
    byte_level().save_pretrained(folder / "writer")
    (folder / "load.json").write_text(json.dumps([{"at": 0.1, "prompt": 3, "tokens": 2}] * 3))
    rows = [f"{n}e6,{n}e7,{4 / n}" for n in range(1, 9)]
    (folder / "points.csv").write_text("\n".join(["parameters,tokens,loss", *rows]))
    (folder / "taken").mkdir()
    (folder / "taken" / "thesis.tex").write_text("years of work")
    return folder


@dataclass(frozen=True)
class Line:
    """The words of a command, and what a file of options holds, if one is given."""

    words: list[str]
    file: dict[str, Any] | None = None


def choices(option: Any) -> list[str]:
    """The words that an option's help names."""
    found = re.search(r"[Oo]ne of (.+?)[.;]", option.help or "")
    return [] if found is None else [word for word in found[1].split(", ") if word not in SLOW]


def lines(command: Any) -> st.SearchStrategy[Line]:
    """A right command line, some of whose words are replaced, left out or added."""
    options = [
        p
        for p in command.params
        if p.param_type_name == "option" and p.name != "help" and (command.name, p.name) != DRAWS
    ]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    known = {p.name for p in (*options, *arguments)}

    def values(option: Any) -> st.SearchStrategy[str]:
        right = [RIGHT[option.name]] if option.name in RIGHT else []
        if option.name in ("model", "models", "sources", "runs"):
            right += ["writer", "finished"]
        return st.one_of([st.sampled_from(some) for some in (ODD, choices(option), right) if some])

    @st.composite
    def drawn(draw: st.DrawFn) -> Line:
        changed = set(draw(st.lists(st.sampled_from(sorted(known)), max_size=4)))
        # Most of what writes needs a model that does.
        model = draw(st.sampled_from(["model", "model", "writer"]))
        line: list[str] = []
        for argument in arguments:
            right = model if RIGHT.get(argument.name) == "model" else RIGHT.get(argument.name, "x")
            line.append(draw(values(argument)) if argument.name in changed else right)
        for option in options:
            flag = option.opts[0]
            if option.is_flag:
                if option.name in changed or option.name in NO_WORK:
                    line.append(draw(st.sampled_from([flag, *option.secondary_opts])))
            elif option.name in changed and option.name != "config":
                line += [flag, draw(values(option))]
            elif option.required or option.name in SMALL:
                line += [flag, SMALL.get(option.name) or RIGHT.get(option.name, "x")]
        # A word that begins with a dash is an option: as in a shell, it may stand anywhere.
        if "config" not in changed:
            return Line(line)
        names = st.sampled_from([*sorted(known - NO_WORK), "unknown"])
        file = draw(st.dictionaries(names, st.sampled_from(IN_A_FILE), max_size=3))
        return Line([*line, "--config", "options.yaml"], file)

    return drawn()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_works_or_says_why_not(
    name: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    monkeypatch.setattr("everydepth.app.serve", lambda *_, **__: None)
    # A cluster of Ray takes a minute to start, and waits for a signal.
    monkeypatch.setattr("everydepth.cli.serve._replicated", lambda *_: None)
    app = build_app()

    kept = shutil.copytree(home, tmp_path / "kept")

    def check(line: Line) -> None:
        if line.file is not None:
            (home / "options.yaml").write_text(yaml.safe_dump(line.file))
        with unchanged(folder=home / "taken"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            words = [name, *line.words]
            done = CliRunner().invoke(app, words, env={"COLUMNS": "100", "TERM": "dumb"})
        if tree(home) != tree(kept):
            empty(home)
            shutil.copytree(kept, home, dirs_exist_ok=True)
        error = done.exception
        # What the system refuses is put into words at the top of the command line.
        if error is not None and not isinstance(error, SystemExit | EveryDepthError | OSError):
            raise error

    fuzzed(lines(COMMANDS[name]), check, examples=2)
