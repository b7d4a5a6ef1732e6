"""What people and programs read about the project before they read its code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import everydepth

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HEADING = re.compile(r"^## \[(.+?)\](?: - (\d{4}-\d{2}-\d{2}))?$", re.MULTILINE)


def test_the_changelog_has_a_dated_entry_for_this_version() -> None:
    entries = HEADING.findall((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert entries[0] == ("Unreleased", "")
    dated = dict(entries[1:])
    assert dated[everydepth.__version__]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == everydepth.__version__
    assert str(cited["date-released"]) == dated[everydepth.__version__]


def test_the_pythons_that_are_claimed_are_the_ones_tested() -> None:
    prefix = "Programming Language :: Python :: 3."
    claimed = [c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if c.startswith(prefix)]
    assert f">={claimed[0]}" == PROJECT["requires-python"]
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == claimed


def targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("file", ["AGENTS.md", "CONTRIBUTING.md", "README.md", "SECURITY.md"])
def test_every_target_and_file_that_the_project_names_is_there(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert set(re.findall(r"`make (?:V=1 )?([a-z]+)", text)) <= targets()
    paths = re.findall(r"`((?:tests|docs|src|benchmarks|examples|cli|stream)/[\w./]+)`", text)
    places = (ROOT, ROOT / "src/everydepth")
    assert [path for path in paths if not any((at / path).exists() for at in places)] == []


@pytest.mark.parametrize(
    "file", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda file: file.stem
)
def test_workflows_call_targets_of_the_makefile(file: Path) -> None:
    jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    called = [command.split()[1] for command in commands if command.startswith("make ")]
    assert called
    assert set(called) <= targets()


def test_issue_forms_ask_for_what_helps() -> None:
    forms = ROOT / ".github" / "ISSUE_TEMPLATE"
    for name, wanted in (
        ("bug", "everydepth env"),
        ("feature", "How it would look"),
        ("model", "print(ed.as_stream(model))"),
    ):
        form = yaml.safe_load((forms / f"{name}.yml").read_text(encoding="utf-8"))
        labels = [part["attributes"]["label"] for part in form["body"]]
        assert any(wanted in label for label in labels)
