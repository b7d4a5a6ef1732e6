"""Answers written before all results were saved alike: where each is read.

A verb keeps the module that reads its own old files. Its `convert(name, content, folder)` gets the
object that a file or an entry of results.json held, and the folder it lay in.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from everydepth.results.results import Results

GROUP = "everydepth.earlier"
"""The entry points by which another package names its own."""

HOMES = {
    "trace": "everydepth.tracing.earlier",
    "profile": "everydepth.exits.earlier",
    "exits": "everydepth.exits.earlier",
    "ablation": "everydepth.ablations.earlier",
    "GradientWatch": "everydepth.ablations.earlier",
    "growth": "everydepth.growth.shown",
    "growth_score": "everydepth.growth.shown",
    "growth_certificate": "everydepth.growth.shown",
    "growth_comparison": "everydepth.growth.shown",
    "scaling": "everydepth.growth.shown",
    "sweep": "everydepth.runs.shown",
}


def home_of(name: str) -> str | None:
    """The module that reads what was called `name`; None if none does."""
    others = {point.name: point.value for point in entry_points(group=GROUP)}
    return HOMES.get(name) or others.get(name)


def converted(name: str, content: Any, folder: Path) -> Results | None:
    """The results that the content comes to; None if it is nothing to show."""
    home = home_of(name)
    return None if home is None else import_module(home).convert(name, content, folder)
