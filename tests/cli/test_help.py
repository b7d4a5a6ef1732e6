"""`everydepth --help` teaches: an order to begin in, and an example of every command."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from everydepth.cli.main import COMMANDS, build_app

NAMES = [command.__name__ for command in COMMANDS if command.__name__ not in ("env", "claims")]


def shown(*arguments: str) -> str:
    found = CliRunner().invoke(build_app(), [*arguments, "--help"], env={"COLUMNS": "120"})
    assert found.exit_code == 0
    return re.sub(r"\s+", " ", found.output)


def test_the_first_help_gives_an_order_to_begin_in() -> None:
    text = shown()
    places = [text.index(f"everydepth {name} ") for name in ("train", "trace", "profile", "report")]
    assert places == sorted(places)


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_a_command_has_an_example(name: str) -> None:
    assert re.search(
        rf"everydepth {name}( |$)", shown(name).partition("Usage:")[2].partition("]")[2]
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_command_uses_options_it_has(name: str) -> None:
    text = (next(c for c in COMMANDS if c.__name__ == name).__doc__ or "").replace("\n", " ")
    (example, *_) = re.findall(rf"everydepth {name} .*?(?=  |$)", text)
    options = re.findall(r"(?<= )--[a-z-]+", example)
    assert [option for option in options if option not in shown(name)] == []


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["train", "serve", "export"])
def test_help_leaves_room_for_its_words(name: str, width: int) -> None:
    found = CliRunner().invoke(build_app(), [name, "--help"], env={"COLUMNS": str(width)}).output
    assert max(map(len, found.splitlines())) <= width
    assert "…" not in found
    assert " range>" not in found
    # Paragraphs are filled: only their last line, or one before a long word, is short.
    (prose,) = re.findall(r"\$ everydepth .*?\n\s*\n(.*?)╭", found, re.DOTALL)
    lines = [line.strip() for line in prose.splitlines()]
    for line, following in pairwise(lines):
        if line and following and not following.startswith(("$", "-d")):
            assert len(line) + 1 + len(following.split()[0]) > width - 4


def test_a_flag_that_is_off_has_no_twin_and_one_that_is_on_has() -> None:
    assert "--no-overwrite" not in shown("export")
    assert "--no-shuffle" in shown("train")


@pytest.mark.parametrize("name", [(), ("trace",), ("plan",)])
def test_help_is_shown_as_a_flag_without_a_value(name: tuple[str, ...]) -> None:
    assert "--help -h Show this message and exit." in shown(*name)
