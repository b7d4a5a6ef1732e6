"""Latencies and depths of finished requests, as Results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from everydepth.results import Result, Results, curve, named, provenance, scalars


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A finished request: its end, its time to the last and first token, depth and tokens."""

    at: float
    seconds: float
    first: float
    depth: int
    tokens: int


def answered(
    seen: Sequence[Answered],
    seconds: float,
    *,
    quality: Mapping[int, float] | None = None,
    facts: Mapping[str, float] | None = None,
    curves: bool = False,
) -> LoadResult:
    """Results of finished requests.

    seconds: the time in which they were answered.
    facts: more numbers to include.
    curves: also plot each request.
    """
    took, depths = np.array([one.seconds for one in seen]), np.array([one.depth for one in seen])
    numbers: dict[str, float | None] = {"requests": len(seen)}
    if seen:
        known = [quality[one.depth] for one in seen if quality and one.depth in quality]
        numbers |= {
            "p50_seconds": float(np.quantile(took, 0.5)),
            "p95_seconds": float(np.quantile(took, 0.95)),
            "p95_first_token": float(np.quantile([one.first for one in seen], 0.95)),
            "tokens_per_second": sum(one.tokens for one in seen) / max(seconds, 1e-12),
            "mean_depth": float(depths.mean()),
            "least_depth": float(depths.min()),
            "mean_quality": float(np.mean(known)) if len(known) == len(seen) else None,
        }
    about = "Latencies and depths of the requests; seconds count from their arrival."
    load = scalars("load", numbers | dict(facts or {}), title="load", about=about)
    drawn = _curves(seen) if seen and curves else ()
    return LoadResult(results=named(load, *drawn), about=provenance(samples=len(seen)))


def _curves(seen: Sequence[Answered]) -> tuple[Result, Result]:
    order = sorted(seen, key=lambda one: one.at)
    latency = curve(
        "latency",
        [round(one.at - order[-1].at, 3) for one in order],
        [one.seconds for one in order],
        axis="second",
        kind="scatter",
        title="latency",
        unit="s",
        better="lower",
        about="The duration of each request, by the time of its end.",
    )
    counts = Counter(one.depth for one in seen)
    each = range(min(counts), max(counts) + 1)
    depths = curve(
        "depths",
        list(each),
        [counts[depth] for depth in each],
        kind="bars",
        title="requests by depth",
        about="The number of requests answered at each depth.",
    )
    return latency, depths


class LoadResult(Results, kind="load"):
    """Latencies, speed and depths under a load."""

    @property
    def numbers(self) -> dict[str, float]:
        """All numbers, by name."""
        return {name: float(value) for name, value in self.result("load").arrays.items()}
