"""Results made by hand, with every kind and with texts that would do harm if they were run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from everydepth.results.result import Kind, Result
from everydepth.tracing.metric import in_words
from everydepth.tracing.record import Trace

HOSTILE = "</script><script>window.harmed = true</script><img src=x onerror='window.harmed = true'>"
QUANTILES = ("q05", "q25", "q50", "q75", "q95")


def curve(
    name: str, values: Sequence[float], label: str | None = None, *, first: int = 0, **more: Any
) -> Result:
    depth = np.arange(first, first + len(values))
    return Result(
        name=name,
        kind="curve",
        series=("value",),
        arrays={"depth": depth, "value": np.asarray(values, float), **more},
        labels={"depth": "depth (blocks)", "value": label or name},
    )


def every_kind(depth: int = 4, seed: int = 0) -> dict[str, Result]:
    """One result of each layout that charts know, by name."""
    random = np.random.default_rng(seed)
    d = np.arange(depth + 1)
    square = np.exp(-np.abs(d[:, None] - d[None]) / (1 + seed))
    counts = random.integers(1, 40, depth + 1)
    text = np.array([["<script>", "$x$", HOSTILE]] * (depth + 1))
    quantiles = dict(zip(QUANTILES, np.sort(random.random((5, depth + 1)), 0), strict=True))

    def make(name: str, kind: Kind, series: Sequence[str], arrays: Any, labels: Any) -> Result:
        return Result(name=name, kind=kind, series=tuple(series), arrays=arrays, labels=labels)

    found = [
        curve("accuracy", np.linspace(0.1, 0.9 + seed / 20, depth + 1).tolist(), "accuracy"),
        curve("loss", np.geomspace(9, 1e-4, depth + 1).tolist(), "cross-entropy (nat)"),
        curve("margin", quantiles["q50"].tolist(), "margin (logit)", **quantiles),
        make(
            "collapse",
            "curve",
            ("nc1", "nc3"),
            {"depth": d, "nc1": d / 2, "nc3": d / 3},
            {"nc1": "NC1, variance", "nc3": "NC3, distance"},
        ),
        make(
            "cos",
            "matrix",
            ("value",),
            {"depth": d, "columns": d, "value": square},
            {"value": "COS"},
        ),
        make(
            "saturation",
            "histogram",
            ("count",),
            {"depth": d, "count": counts, "cumulative": np.cumsum(counts) / counts.sum()},
            {},
        ),
        make(
            "token_grid",
            "grid",
            ("text",),
            {
                "depth": d,
                "tokens": np.array(["a", "$b", HOSTILE]),
                "text": text,
                "probability": random.random(text.shape),
            },
            {},
        ),
        make("rises", "scalar", ("rises", "share"), _scalars(rises=2.0, share=0.5), {}),
        make(
            "pairs",
            "table",
            ("layer", "gradient", "margin"),
            {
                "layer": np.array([f"block {i}" for i in d]),
                "gradient": random.random(depth + 1),
                "margin": random.random(depth + 1),
            },
            {},
        ),
        make("when", "table", ("final", "right"), {"final": counts % 4, "right": counts % 3}, {}),
        make("once", "table", ("final",), {"final": counts % 4}, {}),
        make(
            "needed",
            "table",
            ("epsilon", "blocks"),
            {"epsilon": np.array([0.0, 0.1, 0.2]), "blocks": np.array([3, 2, 1])},
            {},
        ),
    ]
    sizes = np.sort(random.random(depth + 1))
    found += [
        replace(curve("cut", sizes.tolist(), "size (MB)"), kind="bars"),
        Result(
            name="skips",
            kind="family",
            axis="layer",
            series=("value",),
            arrays={
                "layer": d[1:],
                "columns": np.array([0.0, 0.5, 1.0]),
                "value": random.random((depth, 3)),
            },
            labels={"columns": "c ="},
            unit="share",
        ),
        Result(
            name="tradeoff",
            kind="scatter",
            axis="ms",
            series=("quality",),
            arrays={
                "ms": sizes,
                "quality": random.random(depth + 1),
                "front": d % 2 == 0,
                "text": np.array([f"depth {i}" for i in d]),
            },
        ),
        Result(
            name="arms",
            kind="curve",
            axis="flop",
            series=("grown", "longer"),
            arrays={
                "grown": sizes,
                "grown_flop": sizes * 10,
                "grown_low": sizes - 1,
                "grown_high": sizes + 1,
                "longer": sizes[:2],
                "longer_flop": sizes[:2] * 20,
            },
        ),
    ]
    return {result.name: result for result in found}


def _scalars(**values: float) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in values.items()}


def trace_of(*results: Result, depth: int = 4, **meta: Any) -> Trace:
    about = {"model": "Sample", "task": "classification", "depth": depth, "samples": 100}
    return Trace(results={r.name: in_words(r) for r in results}, about={**about, **meta})
