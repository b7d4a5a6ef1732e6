"""What is there by default: made once, kept, and found again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.playground import classifier, save_run

from everydepth.app.content import SURFACE, Effort, is_learned, learn_surface, prepare
from everydepth.app.shelf import shelf_of
from everydepth.data import load_digits

TINY = Effort(tales=40, tales_steps=1, surface_points=100, surface_epochs=1, progress=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make demo` leaves it: classifiers, nothing else."""
    made = tmp_path_factory.mktemp("demo")
    save_run(made / "lpa", classifier(), data=load_digits("test").subset(range(20)))
    return made


def test_what_is_missing_is_made_once(folder: Path) -> None:
    said: list[str] = []
    prepare(folder, TINY, say=said.append)
    assert [line.partition(" for the playground")[0] for line in said] == [
        "training a language model of small tales",
        "training a surface, end-to-end and with LPA",
    ]
    prepare(folder, TINY, say=lambda line: pytest.fail(line))
    shelf = shelf_of(folder)
    assert shelf.of("vision") == ["lpa"]
    assert shelf.of("language") == ["tales"]
    assert shelf.of("surface") == [f"surfaces/{SURFACE}/{way}" for way in ("end-to-end", "lpa")]
    assert len(shelf.runs()) == 4
    assert shelf["tales"].tokenizer.decode(shelf["tales"].tokenizer.encode("a kite")) == "a kite"
    assert shelf[f"surfaces/{SURFACE}/lpa"].data == f"surface:{SURFACE}"


def test_another_surface_is_learned_when_it_is_asked_for(folder: Path) -> None:
    other, shares = "exponential_saddle", list[float]()
    assert not is_learned(folder, other)
    learn_surface(folder, other, TINY, progress=shares.append)
    assert is_learned(folder, other)
    assert shares == [0.0, 0.5, 1.0]
