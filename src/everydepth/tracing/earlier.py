"""Traces saved before all results were saved alike: `trace.json` and `trace.npz`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from everydepth.results import Result
from everydepth.results.saving import check_counts, check_format, checked, read_results
from everydepth.tracing.metric import in_words
from everydepth.tracing.record import Trace

VERSION = 1
_HEAD = ("model", "task", "depth", "samples", "rows", "passes", "partial", "skipped")


def convert(name: str, content: Mapping[str, Any], folder: Path) -> Trace:
    """The words that such a trace lacks are those of the metrics of today."""
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
        results["parameters"] = parameters(np.array(kept, dtype=np.int64))
    return Trace(results=results, about={**meta, **about})


def parameters(kept: np.ndarray) -> Result:
    """Parameters that a model cut to depth 0..L keeps."""
    return Result(
        name="parameters",
        kind="curve",
        series=("value",),
        arrays={"depth": np.arange(len(kept)), "value": kept},
        labels={"depth": "depth (blocks)", "value": "parameters"},
        title="Parameters",
        about="What is left to store when the model is cut to this depth.",
        unit="count",
        better="lower",
        section="cost",
    )
