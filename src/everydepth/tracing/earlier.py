"""Reads traces saved by earlier versions, as `trace.json` and `trace.npz`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everydepth.results.saving import check_counts, check_format, checked, read_results
from everydepth.tracing.metric import in_words
from everydepth.tracing.parameters import kept_parameters
from everydepth.tracing.record import Trace

VERSION = 1
_HEAD = ("model", "task", "depth", "samples", "rows", "passes", "partial", "skipped")


def convert(name: str, content: Mapping[str, Any], folder: Path) -> Trace:
    """The trace, with titles, units and descriptions taken from today's metrics."""
    check_format(folder, content.get("version"), VERSION)
    about = {key: content[key] for key in _HEAD}
    checked(about["skipped"], Mapping, "skipped")
    check_counts({**about, "depth": checked(about["depth"], int, "depth")})
    results = {
        name: in_words(result)
        for name, result in read_results(folder, f"{name}.npz", content["results"]).items()
    }
    meta = dict(checked(content["meta"], dict, "meta"))
    kept = meta.pop("parameters_by_depth", None)
    if isinstance(kept, list):
        results["parameters"] = kept_parameters(kept)
    return Trace(results=results, about={**meta, **about})
