"""Importing everydepth is light: what a command or a name does not need is not loaded."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ("torch", "transformers", "plotly", "matplotlib", "sklearn", "gradio", "ray", "lightning")


def loaded(code: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter has after running the code."""
    shown = f"{code}\nimport json, sys\nprint(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    found = subprocess.run(
        [sys.executable, "-c", shown], capture_output=True, text=True, check=True
    )
    return set(json.loads(found.stdout.splitlines()[-1]))


def test_importing_everydepth_loads_nothing_heavy() -> None:
    assert loaded("import everydepth") == set()


def test_the_command_line_starts_without_torch() -> None:
    assert loaded("from everydepth.cli.main import build_app; build_app()") == set()


def test_recipes_are_listed_without_torch() -> None:
    assert (
        loaded("from everydepth_papers.commands.reproduce import reproduce; reproduce(show=True)")
        == set()
    )


def test_names_are_loaded_without_transformers_or_a_drawing_library() -> None:
    names = ["as_stream", "lpa", "trace", "profile", "generate", "ablate"]
    assert loaded(f"import everydepth as ed; {', '.join(f'ed.{n}' for n in names)}") == {"torch"}


def test_growing_and_training_draw_nothing() -> None:
    drawing = loaded("import everydepth as ed; ed.fit, ed.grow, ed.EveryDepth, ed.sweep")
    assert drawing.isdisjoint({"plotly", "matplotlib", "gradio", "ray", "lightning"})
