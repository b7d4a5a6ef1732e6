"""Run directories and saved traces, read so that those of a stranger are safe to open.

Only files of known names are read, none that leads out of its folder, none unpacked beyond a limit;
JSON and numpy arrays without pickles hold no code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from everydepth.errors import DataError, EveryDepthError
from everydepth.report.panels import registered
from everydepth.results.saving import BROKEN, find, inside, is_saved, read_object
from everydepth.runs import Run
from everydepth.tracing.record import Trace

BESIDE = ("profile", "exits")
"""What other commands may put into a run directory, each as an object in `<name>.json`."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """What one run has to show; whatever it lacks is empty.

    results: what `panels` draw, by name: a `Result` each from the trace, plain JSON from
    results.json. history: the lines of metrics.jsonl.
    """

    name: str
    trace: Trace | None = None
    results: Mapping[str, Any] = field(default_factory=dict[str, Any])
    history: Sequence[Mapping[str, Any]] = ()
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any])


def read(path: str | Path, name: str | None = None) -> RunView:
    """The run directory or the saved trace in a folder, called `name` or like the folder."""
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(
            f"{str(path)!r} is not a folder; give a run directory or a folder written by Trace.save"
        )
    called = name or folder.resolve().name
    if is_saved(folder):
        return view_of(Trace.load(folder), called)
    if not inside(folder, "config.json"):
        raise DataError(
            f"the folder {str(path)!r} holds neither a run (config.json) nor a trace (trace.json); "
            "give the folder that a command of everydepth wrote"
        )
    for file in ("metrics.jsonl", "results.json"):
        inside(folder, file)
    try:
        return _run(folder, called)
    except EveryDepthError:
        raise
    except BROKEN as error:
        raise DataError(
            f"{folder} does not hold a whole run ({type(error).__name__}: {error}); "
            "restore it from a copy"
        ) from error


def _run(folder: Path, called: str) -> RunView:
    run = Run.open(folder)
    history = run.metrics()
    if not all(isinstance(line, dict) for line in history):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError("a line of metrics.jsonl is not an object")
    traced = RunView(name=called)
    saved = find(folder)
    if "trace" in saved:
        traced = view_of(Trace.load(saved["trace"]), called)
    beside = {name: read_object(folder, f"{name}.json") for name in BESIDE}
    results = run.results() if run.finished else {}
    seen = results.get("callbacks")
    watched = seen if isinstance(seen, dict) else {}
    return replace(
        traced,
        results={
            **results,
            **{name: watched[name] for name in registered() if name in watched},
            **{name: found for name, found in beside.items() if found},
            **traced.results,
        },
        history=history,
        config=dict(run.config),
        environment=read_object(folder, "environment.json"),
    )


def view_of(trace: Trace, name: str) -> RunView:
    """A trace by itself. What a command noted beside it can have a panel of its own."""
    noted = {key: value for key, value in trace.about.items() if key in registered()}
    return RunView(name=name, trace=trace, results={**noted, **trace.results})
