"""Whatever a public function is given, it answers or says why not, and leaves the rest alone."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from hypothesis import strategies as st
from tests.fuzz.budget import fuzzed
from tests.fuzz.surface import public
from tests.fuzz.values import (
    QUIET,
    RECIPE,
    Call,
    State,
    World,
    calls,
    parameters_of,
    reading,
    seeing,
    writing,
)
from tests.fuzz.watching import empty, unchanged
from tests.helpers.gguf_files import write_tiny

import everydepth as ed
import everydepth.data
from everydepth.data.batches import Batches
from everydepth.errors import EveryDepthError
from everydepth.growth.comparing import compare
from everydepth.growth.scoring import score
from everydepth.results import Table
from everydepth.stream import registry
from everydepth.tracing import metric
from everydepth_papers.claims.checking import check_claims
from everydepth_papers.evidence.running import reproduce

PUBLIC = public()
METHODS: dict[str, tuple[Callable[[World], Any], tuple[str, ...]]] = {
    "results": (
        lambda world: ed.trace(world.model, world.rows(), ["loss", "contributions"], **QUIET),
        ("result", "table", "plot", "figure", "save", "load", "with_about", "from_json"),
    ),
    "a result": (
        lambda world: ed.trace(world.model, world.rows(), ["loss"], **QUIET).result("loss"),
        ("at_depth", "label", "x"),
    ),
    "a profile": (
        lambda world: ed.profile(world.model, world.rows(), repeats=1, **QUIET),
        ("at", "drop", "choose", "pareto", "table", "plot", "figure"),
    ),
    "an ablation": (
        lambda world: ed.ablate(world.model, world.rows(), c=(0.0, 1.0), **QUIET),
        ("at", "table", "plot", "figure"),
    ),
    "an audit": (
        lambda world: ed.audit(world.model, world.rows(), **QUIET),
        ("suspects", "table", "plot", "figure"),
    ),
    "scores": (
        lambda world: score(world.model, world.rows(), **QUIET),
        ("at", "table", "plot", "figure"),
    ),
    "a comparison": (lambda world: _compared(world), ("ratios", "summary", "table", "figure")),
    "a ledger": (
        lambda world: check_claims(world.model, [world.rows()] * 2, **QUIET),
        ("entry", "counts", "markdown", "table", "figure"),
    ),
    "a reproduction": (
        lambda _: reproduce(RECIPE, preset="smoke", run=Path("reproduced"), **QUIET),
        ("table", "figure", "plot"),
    ),
    "a policy": (
        lambda _: ed.Confidence(threshold=0.9),
        ("save", "load", "from_json", "for_stream", "thresholds"),
    ),
    "thresholds of every depth": (
        lambda _: ed.Patience(threshold=(1, 2, 1)),
        ("save", "for_stream", "thresholds"),
    ),
    "an objective": (
        lambda _: ed.lpa(),
        (
            "annealed", "warmed_up", "sampled", "equilibrated", "distilled", "layer_dropout",
            "cycle", "moment", "weights", "expected_weights", "label_weights", "check", "get",
            "from_json",
        ),
    ),
    "a changing objective": (
        lambda _: ed.ladder().sampled(1).annealed(),
        ("cycle", "weights", "expected_weights", "check"),
    ),
    "a network": (
        lambda world: ed.EveryDepth(world.model, objective=ed.lpa()),
        ("logits_of", "check_labels", "save_pretrained", "set_progress"),
    ),
    "a call of a network": (lambda world: _Trained(world), ("forward",)),
    "a run": (lambda _: ed.Run, ("create", "open", "exists", "check_free", "resumed")),
    "an open run": (
        lambda _: ed.Run.create(Path("run").absolute(), {"a": 1}),
        (
            "check_config", "log", "metrics", "checkpoints", "latest", "best", "checkpoint",
            "results", "write_results", "save_checkpoint",
        ),
    ),
    "a table of results": (
        lambda world: ed.trace(world.model, world.rows(), ["loss"], **QUIET).table(),
        ("column", "markdown", "to_pandas"),
    ),
    "rows": (
        lambda _: everydepth.data.load_digits("test"),
        ("subset", "first", "split", "batch", "normalized", "as_float"),
    ),
    "a corpus": (lambda _: everydepth.data.Corpus("one two three"), ("split",)),
    "a table": (lambda _: everydepth.data.Table({"x": ["1", "2"]}), ("numbers",)),
    "a stream": (
        lambda world: ed.as_stream(world.model),
        (
            "observe", "start", "advance", "check_depth", "check_batch", "linear_head",
            "new_cache", "truncated", "kept",
        ),
    ),
    "states": (
        lambda world: ed.as_stream(world.model).observe(world.rows()),
        ("logits", "feature", "exit_state", "check_finite", "check_predictions"),
    ),
    "a cursor": (lambda world: ed.as_stream(world.model).start(world.rows()), ("select",)),
}  # fmt: skip
"""What the methods of a value are called with."""


class _Trained:
    """A network that is called with a batch by name."""

    def __init__(self, world: World) -> None:
        self.net = ed.EveryDepth(world.model, objective=ed.lpa())

    def forward(self, batch: Any, depths: Sequence[int] = (), labels: Any = None) -> Any:
        named = isinstance(batch, dict) and all(isinstance(key, str) for key in batch)
        more = {} if labels is None else {"labels": labels}
        return self.net(**{**batch, **more}, depths=depths) if named else None


def _compared(world: World) -> Any:
    arms = ("grown", "longer")
    rows = world.rows()
    return compare(
        world.model,
        rows,
        rows,
        steps=2,
        evaluations=1,
        arms=arms,
        seeds=(0,),
        batch_size=4,
        **QUIET,
    )


CHANGES = {
    "everydepth.training.fitting.fit": ("(weights)", "(gradient)", "(mode)"),
    # It freezes the model, which then stays in eval mode.
    "everydepth.training.balcony.balcony": ("(requires_grad)", "(mode)"),
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


def show(found: Any) -> None:
    """What was answered can be read: it is printed, and what holds rows is read."""
    if not type(found).__module__.startswith("everydepth"):
        return
    str(found), repr(found)
    with contextlib.suppress(EveryDepthError):
        if isinstance(found, ed.Results):
            str(found.table())
        if isinstance(found, Table):
            found.markdown()
        if isinstance(found, Batches):
            next(iter(found))
    if hasattr(found, "to_json"):
        json.dumps(found.to_json())


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
        call.state.put(call.world.model)
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
                show(found)
            except EveryDepthError:
                pass
        for entry in place.iterdir():
            if entry.name not in ("taken", "model", "model.gguf"):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for world, before in zip(worlds, originals, strict=True):
            State.usual.put(world.model)
            if name in CHANGES:
                world.model.load_state_dict(before)

    fuzzed(calls(function, worlds), check, examples=4)


@pytest.mark.parametrize("kind", METHODS)
def test_a_public_method_answers_or_says_why_not(
    kind: str, worlds: list[World], place: Path
) -> None:
    make, names = METHODS[kind]
    made: list[tuple[World, Any]] = []
    for world in worlds[:2]:
        with contextlib.suppress(EveryDepthError):  # not every verb is for every model
            made.append((world, make(world)))
    before = shutil.copytree(place, place.with_name(f"{place.name} before"))
    each = [
        st.tuples(st.just(name), calls(getattr(value, name), [world]))
        for world, value in made
        for name in names
    ]
    values = {world.model: value for world, value in made}
    makes = {"a network", "a call of a network"}  # they count their calls

    def check(asked: tuple[str, Call]) -> None:
        name, call = asked
        value = make(call.world) if kind in makes else values[call.world.model]
        method = getattr(value, name)
        given = call.arguments(method, parameters_of(method), place)
        with unchanged(call.world.model, folder=place / "taken"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(EveryDepthError):
                show(method(**given))
        plt.close("all")
        empty(place)
        shutil.copytree(before, place, dirs_exist_ok=True)

    fuzzed(st.one_of(each), check, examples=6)
