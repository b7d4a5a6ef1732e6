"""Reads run directories and saved results; safe for untrusted ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everydepth.errors import DataError, EveryDepthError
from everydepth.files import explained
from everydepth.results import Results
from everydepth.results.saving import BROKEN, find, inside, is_saved, read_object
from everydepth.runs import Run
from everydepth.runs.history import history


@dataclass(frozen=True, kw_only=True)
class RunView:
    """The contents of a run; whatever it lacks is empty.

    answers: its Results by name, those with the most measurements first.
    """

    name: str
    answers: Mapping[str, Results]
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any])


def view_of(results: Results, name: str | None = None) -> RunView:
    """A view of Results that are not part of a run."""
    return RunView(name=name or results.model or results.kind, answers={results.kind: results})


@explained("the run cannot be read", DataError)
def read(path: str | Path, name: str | None = None) -> RunView:
    """A view of a run directory or of saved results. name: by default that of the folder."""
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(
            f"{str(path)!r} is not a folder; give a run directory or a folder written by "
            "Results.save"
        )
    called = name or folder.resolve().name
    if is_saved(folder):
        return view_of(Results.load(folder), called)
    if not inside(folder, "config.json"):
        raise DataError(
            f"the folder {str(path)!r} holds neither a run (config.json) nor results "
            "(measured.json); give a folder written by everydepth"
        )
    inside(folder, "metrics.jsonl")
    try:
        return _run(folder, called)
    except EveryDepthError:
        raise
    except BROKEN as error:
        raise DataError(
            f"the run in {folder} is incomplete ({type(error).__name__}: {error}); restore it from "
            "a copy"
        ) from error


def _run(folder: Path, called: str) -> RunView:
    run = Run.open(folder)
    found = {name: Results.load(place) for name, place in find(folder).items()}
    most_first = sorted(found.items(), key=lambda item: -len(item[1]))
    trained = history(run.metrics())
    return RunView(
        name=called,
        answers=dict(most_first) | ({trained.kind: trained} if len(trained) else {}),
        config=dict(run.config),
        environment=read_object(folder, "environment.json"),
    )
