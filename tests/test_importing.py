"""Importing everydepth is light: what a command or a name does not need is not loaded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "plotly", "matplotlib", "sklearn", "gradio", "ray", "lightning")


STEPS = {
    "everydepth": "import everydepth as ed",
    "the command line": "from everydepth.cli.main import build_app; build_app()",
    "recipes": "from everydepth_papers.commands.reproduce import reproduce; reproduce(show=True)",
    "names": "ed.as_stream, ed.lpa, ed.trace, ed.profile, ed.generate, ed.ablate",
    "training": "ed.fit, ed.grow, ed.EveryDepth, ed.sweep",
}


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """Which of the heavy packages a fresh interpreter has after each step, one after the other."""
    shown = f"print(json.dumps([m for m in {HEAVY} if m in sys.modules]), file=sys.stderr)"
    code = "\n".join(["import json, sys", *(f"{step}\n{shown}" for step in STEPS.values())])
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lists = [json.loads(line) for line in found.stderr.splitlines() if line.startswith("[")]
    return {step: set(one) for step, one in zip(STEPS, lists, strict=True)}


def test_importing_everydepth_loads_nothing_heavy(loaded: dict[str, set[str]]) -> None:
    assert loaded["everydepth"] == set()


def test_the_command_line_starts_without_torch(loaded: dict[str, set[str]]) -> None:
    assert loaded["the command line"] == set()


def test_recipes_are_listed_without_torch(loaded: dict[str, set[str]]) -> None:
    assert loaded["recipes"] == set()


def test_names_are_loaded_without_transformers_or_a_drawing_library(
    loaded: dict[str, set[str]],
) -> None:
    assert loaded["names"] == {"torch"}


def test_growing_and_training_draw_nothing(loaded: dict[str, set[str]]) -> None:
    drawing = {"plotly", "matplotlib", "gradio", "ray", "lightning"}
    assert loaded["training"].isdisjoint(drawing)
