"""Whatever a public function is given, it answers or says why not, and leaves the rest alone."""

from __future__ import annotations

import contextlib
import copy
import shutil
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from hypothesis import strategies as st
from tests.fuzz.budget import fuzzed
from tests.fuzz.surface import public
from tests.fuzz.values import QUIET, Call, World, calls, parameters_of, reading, seeing, writing
from tests.fuzz.watching import unchanged
from tests.helpers.gguf_files import write_tiny

import everydepth as ed
import everydepth.data
from everydepth.errors import EveryDepthError
from everydepth.stream import registry
from everydepth.tracing import metric

PUBLIC = public()
METHODS: dict[str, tuple[Callable[[World], Any], tuple[str, ...]]] = {
    "results": (
        lambda world: ed.trace(world.model, world.rows(), ["loss", "contributions"], **QUIET),
        ("result", "table", "plot", "figure", "save", "load"),
    ),
    "a result": (
        lambda world: ed.trace(world.model, world.rows(), ["loss"], **QUIET).result("loss"),
        ("at_depth", "label"),
    ),
    "a profile": (
        lambda world: ed.profile(world.model, world.rows(), repeats=1, **QUIET),
        ("at", "drop", "choose"),
    ),
    "a policy": (lambda _: ed.Confidence(threshold=0.9), ("save", "load")),
    "a run": (lambda _: ed.Run, ("create", "open", "exists")),
    "rows": (lambda _: everydepth.data.load_digits("test"), ("subset", "first", "split")),
    "a corpus": (lambda _: everydepth.data.Corpus("one two three"), ("split",)),
    "a table": (lambda _: everydepth.data.Table({"x": ["1", "2"]}), ("numbers",)),
    "states": (
        lambda world: ed.as_stream(world.model).observe(world.rows()),
        ("logits", "feature", "exit_state"),
    ),
}
"""What the methods of a value are called with."""
CHANGES = {
    "everydepth.training.fitting.fit": ("(weights)", "(gradient)", "(mode)"),
    "everydepth.training.balcony.balcony": ("(requires_grad)",),
    "everydepth.exits.generation.generate.generate": (
        "random state",
    ),  # draws as torch does, where no seed is given
    "everydepth.stream.insert.insert": ("random state",),  # draws the new block as torch would
}
"""What a function is for changes this."""


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    return [seeing(), writing(), reading()]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    monkeypatch.setattr(registry, "_by_class", {})
    monkeypatch.setattr(metric, "_registry", dict(metric._registry))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("years of work")
    return tmp_path


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_function_answers_or_says_why_not(
    name: str, worlds: list[World], place: Path
) -> None:
    function = PUBLIC[name]
    parameters = parameters_of(function)
    if any(parameter.name in ("source", "folder", "file") for parameter in parameters):
        worlds[0].model.save_pretrained(place / "model")  # pyright: ignore[reportCallIssue]
        write_tiny(place / "model.gguf")
    originals = [copy.deepcopy(world.model.state_dict()) for world in worlds]

    def check(call: Call) -> None:
        given = call.arguments(function, parameters, place)
        with (
            unchanged(call.world.model, folder=place / "taken", but=CHANGES.get(name, ())),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            try:
                found = function(**given)
                if isinstance(found, AbstractContextManager):
                    with found:
                        pass
            except EveryDepthError:
                pass
        for entry in place.iterdir():
            if entry.name not in ("taken", "model", "model.gguf"):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if name in CHANGES:
            for world, before in zip(worlds, originals, strict=True):
                world.model.load_state_dict(before)
                world.model.eval()
                world.model.zero_grad()
                world.model.requires_grad_(True)

    fuzzed(calls(function, worlds), check, examples=4)


@pytest.mark.parametrize("kind", METHODS)
def test_a_public_method_answers_or_says_why_not(
    kind: str, worlds: list[World], place: Path
) -> None:
    make, names = METHODS[kind]
    world = worlds[1]
    made = make(world)
    methods = {name: getattr(made, name) for name in names}

    def check(named: tuple[str, Call]) -> None:
        name, call = named
        method = methods[name]
        given = call.arguments(method, parameters_of(method), place)
        with unchanged(world.model, folder=place / "taken"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(EveryDepthError):
                method(**given)
        plt.close("all")
        for entry in place.iterdir():
            if entry.name != "taken":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    each = [st.tuples(st.just(name), calls(method, [world])) for name, method in methods.items()]
    fuzzed(st.one_of(each), check, examples=6)
