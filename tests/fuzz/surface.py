"""What is public: what the packages and the reference name, and the methods of what they return."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from everydepth.results import Results
from everydepth.results.results import Number, OptionalNumber
from everydepth_papers.evidence import Recipe

PACKAGES = (
    "everydepth", "everydepth.ablations", "everydepth.data", "everydepth.exits",
    "everydepth.growth", "everydepth.objectives", "everydepth.results", "everydepth.runs",
    "everydepth.serving", "everydepth.tracing", "everydepth.training",
)  # fmt: skip
REFERENCE = Path(__file__).parents[2] / "docs" / "reference"

MADE = {
    "BlockRecords", "Checkpoint", "Coupling", "Cut", "DepthFit", "DepthProfile", "DepthTeam",
    "Drafting", "EveryDepthOutput", "Exiting", "FeatureRows", "Fit", "Generation", "Grown",
    "Guarantee", "Jumpboard", "Latency", "Load", "Menu", "Moment", "ObjectiveReport",
    "Observation", "Paired", "Pass", "Plain", "Plan", "Prediction", "Round", "Row", "Said",
    "ScaledSkip", "SiteScore", "Taps", "TextTeam", "Ticket", "Training", "Widths", "Work", "Block",
    "Branch", "Cursor", "States", "Certificate", "Batches", "Scheduler", "SharedBatch", "Paper",
    "Premise", "Preset", "Stage",
}  # fmt: skip
"""Classes that the library makes, and a caller only receives."""
ELSEWHERE = {"cluster", "restart", "with_lora"}
"""Functions with tests of their own: they start a cluster of Ray, or change a model for good."""


def public() -> dict[str, Callable[..., Any]]:
    """Functions and classes by where they are defined; each once."""
    found = {f"{v.__module__}.{v.__qualname__}": v for v in (*_of_packages(), *_of_reference())}
    return {name: found[name] for name in sorted(found) if _is_called(found[name])}


def _of_packages() -> Iterator[Any]:
    for name in PACKAGES:
        package = import_module(name)
        for word in getattr(package, "__all__", None) or vars(package):
            value = getattr(package, word)
            if not word.startswith("_") and _is_ours(value):
                yield value


def _of_reference() -> Iterator[Any]:
    for page in REFERENCE.glob("*.md"):
        for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE):
            home, _, last = name.rpartition(".")
            value = getattr(import_module(home), last)
            if inspect.ismodule(value):
                own = [v for v in vars(value).values() if _is_ours(v)]
                yield from (
                    v
                    for v in own
                    if v.__module__ == value.__name__ and not v.__name__.startswith("_")
                )
            elif _is_ours(value):
                yield value


def _is_ours(value: Any) -> bool:
    callable_ = inspect.isfunction(value) or isinstance(value, type)
    return callable_ and value.__module__.startswith("everydepth")


def _is_called(value: Any) -> bool:
    if not isinstance(value, type):
        return value.__name__ not in ELSEWHERE
    received = issubclass(value, (Results, BaseException, Number, OptionalNumber))
    written = inspect.isabstract(value) or Protocol in value.__mro__ or "__init__" not in dir(value)
    plain = value.__init__ is object.__init__  # nothing to give
    return (
        not (received or written or plain or value.__name__ in MADE or value is Recipe)
        or value is Results
    )
