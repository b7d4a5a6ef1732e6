"""Run directories and saved traces, read so that those of a stranger are safe to open.

Only files of known names are read, none that leads out of its folder, none unpacked beyond a limit;
JSON and numpy arrays without pickles hold no code.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from everydepth.errors import DataError, EveryDepthError
from everydepth.report.panels import registered
from everydepth.results.result import Kind, Result
from everydepth.runs import Run
from everydepth.tracing.record import Trace

BESIDE = ("profile", "exits")
"""What other commands may put into a run directory, each as an object in `<name>.json`."""
DEEPEST = 100_000  # blocks; more would only be there to fill the memory
# What reading a file can raise that does not look as it should.
_BROKEN = (
    AttributeError,
    EOFError,
    KeyError,
    RecursionError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
)
LARGEST = 512 * 2**20  # bytes of one file, unpacked


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
    if _inside(folder, "trace.json"):
        return view_of(_trace(folder), called)
    if not _inside(folder, "config.json"):
        raise DataError(
            f"the folder {str(path)!r} holds neither a run (config.json) nor a trace (trace.json); "
            "give the folder that a command of everydepth wrote"
        )
    for file in ("metrics.jsonl", "results.json"):
        _inside(folder, file)
    try:
        return _run(folder, called)
    except EveryDepthError:
        raise
    except _BROKEN as error:
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
    if _inside(folder, "trace/trace.json"):
        traced = view_of(_trace(folder / "trace"), called)
    beside = {name: _json(folder, f"{name}.json") for name in BESIDE}
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
        environment=_json(folder, "environment.json"),
    )


def view_of(trace: Trace, name: str) -> RunView:
    """A trace by itself. What a command noted beside it can have a panel of its own."""
    noted = {key: value for key, value in trace.meta.items() if key in registered()}
    return RunView(name=name, trace=trace, results={**noted, **trace.results})


def _trace(folder: Path) -> Trace:
    if not _inside(folder, "trace.npz"):
        raise DataError(f"{folder} has a trace.json but no trace.npz; copy both")
    try:
        with zipfile.ZipFile(folder / "trace.npz") as packed:
            size = sum(entry.file_size for entry in packed.infolist())
        if size > LARGEST:
            raise DataError(
                f"{folder / 'trace.npz'} unpacks to {size / 2**20:.0f} MiB, but a report reads up "
                f"to {LARGEST / 2**20:.0f} MiB; trace fewer metrics"
            )
        return _checked(Trace.load(folder))
    except DataError:
        raise
    except _BROKEN as error:
        raise DataError(
            f"{folder} does not hold a whole trace ({type(error).__name__}: {error}); trace again"
        ) from error


def _checked(trace: Trace) -> Trace:
    """The trace, if it holds what `Trace.save` writes; files of a stranger may hold anything."""
    for name in ("depth", "samples", "rows"):
        number = getattr(trace, name)
        if type(number) is not int or not number >= 0:
            raise ValueError(f"{name} is {number!r}, not a count")
    if trace.depth > DEEPEST:
        raise ValueError(f"depth is {trace.depth}, more than {DEEPEST}")
    for facts in (trace.skipped, trace.meta):
        if not isinstance(facts, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{facts!r:.40} is not an object")
    for result in trace.results.values():
        _check_result(result)
    return trace


def _check_result(result: Result) -> None:
    words = (result.name, result.note or "", *result.labels.values())
    if result.kind not in get_args(Kind) or not all(isinstance(word, str) for word in words):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{result.name!r:.40} is not a result")
    for name in result.series:
        if name not in result.arrays:
            raise KeyError(f"{result.name} has no array {name}")
    depth = result.arrays.get("depth")
    if depth is not None and (
        depth.dtype.kind not in "iu" or not depth.size or depth.min() < 0 or depth.max() > DEEPEST
    ):
        raise ValueError(f"the depths of {result.name} are not depths")


def _inside(folder: Path, name: str) -> bool:
    """Whether the file is there; an error if it is a link that leads out, or too large."""
    file = folder / name
    if not file.is_file():
        return False
    real = file.resolve()
    if not real.is_relative_to(folder.resolve()):
        raise DataError(f"{file} leads out of {folder}, and a report reads only what is inside")
    if real.stat().st_size > LARGEST:
        raise DataError(
            f"{file} has {real.stat().st_size / 2**20:.0f} MiB, but a report reads up to "
            f"{LARGEST / 2**20:.0f} MiB; shorten it"
        )
    return True


def _json(folder: Path, name: str) -> dict[str, Any]:
    """The object in a file; empty if there is none."""
    file = folder / name
    if not _inside(folder, name):
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON ({error}); restore it from a copy") from error
    return found if isinstance(found, dict) else {}
