"""Profiles and evaluations as they were written before all results were saved alike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everydepth.exits.evaluate import Evaluation
from everydepth.exits.profile import DepthProfile, Latency, Profile
from everydepth.results import Results


def convert(name: str, content: Mapping[str, Any], folder: Path) -> Results:
    """profile.json, or the outcome of an exit policy."""
    facts = {k: v for k, v in content.items() if k not in ("format", "depths", "exits", "samples")}
    if name == "profile":
        times = ("latency", "batch_latency")
        rows = [
            DepthProfile(**row | {time: Latency(**row[time]) for time in times})
            for row in content["depths"]
        ]
        return Profile.of(rows, samples=content["samples"], **facts)
    return Evaluation.of(content["exits"], facts)
