"""Whatever a public function is given, it answers or says why not, and leaves the rest alone."""

from __future__ import annotations

import copy
import inspect
import shutil
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.fuzz.budget import fuzzed
from tests.fuzz.values import Call, World, calls, parameters_of, reading, seeing, writing
from tests.fuzz.watching import unchanged
from tests.helpers.gguf_files import write_tiny

import everydepth as ed
import everydepth.data
from everydepth.engines.gguf_cut import cut_gguf
from everydepth.errors import EveryDepthError
from everydepth.exits.certify import certify_depth
from everydepth.exits.policies import Agreement, Entropy, Margin
from everydepth.objectives import CosineDistance, Distilled, Equilibrium, LayerDropout, OwnHeads
from everydepth.serving import ServeConfig, application
from everydepth.stream import registry
from everydepth.tracing import gradient_alignment, metric
from everydepth.training import EarlyStopping, FitConfig, RunConfig
from everydepth_papers.evidence import reproduce
from everydepth_papers.paper import paper

# What the reference documents beside what `everydepth` and its growth and data hold.
DOCUMENTED: tuple[Any, ...] = (
    certify_depth, cut_gguf, reproduce, application, gradient_alignment, paper,
    Entropy, Margin, Agreement, CosineDistance, Distilled, LayerDropout, OwnHeads,
    Equilibrium, FitConfig, RunConfig, EarlyStopping, ServeConfig,
)  # fmt: skip


def _public() -> dict[str, Callable[..., Any]]:
    found: dict[str, Any] = {f"{f.__module__}.{f.__qualname__}": f for f in DOCUMENTED}
    for home, module in (("", ed), ("growth.", ed.growth), ("data.", ed.data)):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value) or (isinstance(value, type) and module is ed):
                found[home + name] = value
    return {k: v for k, v in found.items() if not inspect.isabstract(v)}


PUBLIC = _public()
CHANGES = {
    "fit": ("(weights)", "(gradient)", "(mode)"),
    "balcony": ("(requires_grad)",),
    "generate": ("random state",),  # draws as torch does, where no seed is given
    "insert": ("random state",),  # draws the new block as torch would
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
    if any(parameter.name in ("source", "folder") for parameter in parameters):
        worlds[0].model.save_pretrained(place / "model")  # pyright: ignore[reportCallIssue]
        write_tiny(place / "model.gguf")
    originals = [copy.deepcopy(world.model.state_dict()) for world in worlds]

    def check(call: Call) -> None:
        given = call.arguments(parameters, place)
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
