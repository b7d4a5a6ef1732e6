"""The maps of the project name everything that is there, and nothing that is not."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Neither code nor a room: what Python and Git leave or need.
LEFT_OUT = {"__pycache__", "py.typed"}


def listed(folder: Path) -> set[str]:
    """Modules and packages of a folder, packages with a slash."""
    return {
        entry.name + "/" * entry.is_dir()
        for entry in folder.iterdir()
        if entry.name not in LEFT_OUT
        and (entry.suffix == ".py" or (entry.is_dir() and any(entry.rglob("*.py"))))
    }


def rooms(block: str) -> dict[str, set[str]]:
    """Folder -> what the map names inside it: lines that are not indented name folders."""
    found: dict[str, set[str]] = {}
    folder = ""
    for line in block.splitlines():
        names = re.match(r"\s*((?:[\w./]+ {2})*[\w./]+)", line)
        assert names is not None, line
        if not line.startswith(" "):
            folder = names[1].split()[0]
            found[folder] = set()
        else:
            found[folder] |= set(names[1].split())
    return found


def test_the_map_of_contributing_names_every_room() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (block,) = re.findall(r"```\n(src/everydepth/\n.*?)```", text, flags=re.DOTALL)
    mapped = rooms(block)
    for folder, names in mapped.items():
        assert (ROOT / folder).is_dir(), folder
        if names:
            assert names | {"__init__.py"} == listed(ROOT / folder) | {"__init__.py"}, folder
    assert {f"src/{name}" for name in listed(ROOT / "src")} <= set(mapped)
    beside = {"examples/", "benchmarks/", "tests/", "docs/"}
    assert beside <= set(mapped)


def test_the_map_of_the_stream_names_every_module() -> None:
    folder = ROOT / "src" / "everydepth" / "stream"
    named = set(re.findall(r"^\| `([\w./]+)`", (folder / "README.md").read_text(), flags=re.M))
    inside = {f"discovery/{name}" for name in listed(folder / "discovery") - {"__init__.py"}}
    assert named == listed(folder) - {"__init__.py"} | inside


def test_the_page_on_the_architecture_names_only_what_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    paths = set(re.findall(r"`(\w+(?:/\w+)*(?:/|\.py))`", text))
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / "src" / "everydepth" / path).exists()] == []


def test_the_page_on_the_architecture_names_every_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    there = listed(ROOT / "src" / "everydepth") - {"__init__.py", "__main__.py"}
    named = set(re.findall(r"`([\w/.]+)`", text)) | {"errors.py"}  # `errors`, among the layers
    assert [name for name in there if not any(word.startswith(name) for word in named)] == []
