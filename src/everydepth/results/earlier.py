"""Where to read results from before all of them shared one format.

Each verb reads its own old files: `convert(name, content, folder)` of its module gets the object
from a file or from an entry of results.json, and the folder it was in.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from everydepth.results.results import Results

GROUP = "everydepth.earlier"
"""Entry points of other packages that read old files of their own."""

HOMES = {
    "trace": "everydepth.tracing.earlier",
    "profile": "everydepth.exits.earlier",
    "exits": "everydepth.exits.earlier",
    "ablation": "everydepth.ablations.earlier",
    "GradientWatch": "everydepth.ablations.earlier",
    "growth": "everydepth.growth.measurements",
    "growth_score": "everydepth.growth.measurements",
    "growth_certificate": "everydepth.growth.measurements",
    "growth_comparison": "everydepth.growth.measurements",
    "scaling": "everydepth.growth.measurements",
    "sweep": "everydepth.runs.measurements",
}


def home_of(name: str) -> str | None:
    """The module that reads old results of this name; None if there is none."""
    others = {point.name: point.value for point in entry_points(group=GROUP)}
    return HOMES.get(name) or others.get(name)


def converted(name: str, content: Any, folder: Path) -> Results | None:
    """The results in old content; None if nothing can read it."""
    home = home_of(name)
    return None if home is None else import_module(home).convert(name, content, folder)
