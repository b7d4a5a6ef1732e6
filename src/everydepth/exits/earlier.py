"""Profiles and evaluations as they were written before all results were saved alike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from everydepth.results import Result, Results, curve, named, provenance, scalars
from everydepth.results.results import class_of

SHARES = ("accuracy", "agreement")
COSTS = {  # field: title, unit, what it is
    "parameters": ("Parameters", "count", "Parameters of the plain model cut to this depth."),
    "checkpoint_bytes": ("Size", "bytes", "Tensors of its checkpoint."),
    "flops": ("FLOP", "FLOP", "Floating-point operations of one row."),
    "peak_bytes": ("Memory", "bytes", "Weights and intermediate results of a whole batch."),
}


def convert(name: str, content: Mapping[str, Any], folder: Path) -> Results:
    """profile.json, or the outcome of an exit policy."""
    return _profile(content) if name == "profile" else _exits(content)


def _profile(content: Mapping[str, Any]) -> Results:
    rows = content["depths"]
    depth = [int(row["depth"]) for row in rows]
    size = int(content["batch_size"])
    found = [_latency("batch_latency", rows, "Time", f"a batch of {size}")]
    if "latency" in rows[0]:
        found.append(_latency("latency", rows, "Time of one row", "one row"))
    for key, (title, unit, about) in COSTS.items():
        if key in rows[0]:
            values = np.array([row[key] for row in rows])
            found.append(
                curve(
                    key,
                    depth,
                    values,
                    title=title,
                    unit=unit,
                    about=about,
                    better="lower",
                    section="cost",
                )
            )
    metric = content.get("metric")
    if metric is not None:
        share = metric in SHARES
        quality = curve(
            metric,
            depth,
            [row["quality"] for row in rows],
            about="Quality of the plain model cut to this depth.",
            unit="share" if share else "",
            better="higher" if share else "lower",
            section="prediction",
        )
        found.insert(0, quality)
    about = provenance(model=content.get("model") or "", depth=max(depth), batch_size=size)
    return class_of("profile")(
        results=named(*found), about={**about, "samples": content.get("samples")}, kind="profile"
    )


def _latency(name: str, rows: Any, title: str, what: str) -> Result:
    middle, low, high = ([row[name][k] for row in rows] for k in ("median", "low", "high"))
    return curve(
        name,
        [int(row["depth"]) for row in rows],
        middle,
        low=low,
        high=high,
        labels={"value": f"time of {what}"},
        title=title,
        about=f"Median time of {what} through the model cut to this depth, with quartiles.",
        unit="ms",
        better="lower",
        section="cost",
    )


def _exits(content: Mapping[str, Any]) -> Results:
    count = np.array(content["exits"])
    depth = np.arange(1, len(count) + 1)
    left = curve(
        "exits",
        depth,
        {"count": count},
        kind="histogram",
        title="Where samples leave",
        about="Share of samples that the exit policy lets go at each depth, and up to it.",
        section="decisions",
    )
    keys = ("accuracy", "accuracy_full", "agreement", "mean_depth", "layer_speedup")
    speed = scalars(
        "speed",
        {key: content.get(key) for key in (*keys, "measured_speedup")},
        title="Early exit against the full model",
        about="Speed-ups are times as fast as the full model: measured, and by counted layers.",
        section="decisions",
    )
    return class_of("exits")(
        results=named(left, speed),
        about={"depth": len(count), "samples": content.get("samples")},
        kind="exits",
    )
