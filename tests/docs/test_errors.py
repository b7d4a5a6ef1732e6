"""The page of errors has every class, and its messages are those that are really raised."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import torch

from everydepth import errors

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
CLASSES = [
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.EveryDepthError)
]


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_class_has_a_section_in_the_order_of_the_module() -> None:
    assert list(sections()) == CLASSES


@pytest.mark.parametrize("name", CLASSES[1:])
def test_a_section_shows_the_message_and_the_next_step(name: str) -> None:
    section = sections()[name]
    assert f"\neverydepth.errors.{name}: " in section
    assert "**What to do.**" in section


def test_the_messages_are_those_that_are_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    text = PAGE.read_text(encoding="utf-8")
    page = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    raised = [example for example in page.examples if example.exc_msg is not None]
    assert len(raised) == len(CLASSES) - 1
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    assert runner.run(page, out=said.append).failed == 0, "".join(said)
