"""Traces saved before all results were saved alike: `trace.json` and `trace.npz`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from everydepth.results.saving import (
    check_counts,
    check_format,
    checked,
    read_object,
    read_results,
)
from everydepth.tracing.metric import in_words
from everydepth.tracing.record import Trace

VERSION = 1
_HEAD = ("model", "task", "depth", "samples", "rows", "passes", "partial", "skipped")


def convert(folder: Path) -> Trace:
    """The trace in such a folder; the words that it lacks are those of the metrics of today."""
    head = read_object(folder, "trace.json")
    check_format(folder, head.get("version"), VERSION)
    about = {key: head[key] for key in _HEAD}
    checked(about["skipped"], Mapping, "skipped")
    check_counts({**about, "depth": checked(about["depth"], int, "depth")})
    results = read_results(folder, "trace.npz", head["results"])
    return Trace(
        results={name: in_words(result) for name, result in results.items()},
        about={**checked(head["meta"], dict, "meta"), **about},
    )
