"""The number of parameters at every depth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from everydepth.results import Result, curve
from everydepth.stream import ResidualStream
from everydepth.tracing.sums import DEPTH


def parameters_by_depth(stream: ResidualStream) -> Result:
    """The number of parameters of a model cut to depth 0..L: all but those of later blocks."""
    blocks = [{id(p) for p in block.module.parameters()} for block in stream.blocks]
    size = {id(p): p.numel() for p in stream.model.parameters()}
    found: list[int] = []
    for depth in range(stream.depth + 1):
        kept = set(size) - set[int]().union(*blocks[depth:]) | set[int]().union(*blocks[:depth])
        found.append(sum(size[key] for key in kept))
    return kept_parameters(found)


def kept_parameters(counts: Sequence[int]) -> Result:
    """The same from known counts."""
    return curve(
        "parameters",
        np.arange(len(counts)),
        np.array(counts, dtype=np.int64),
        labels={"depth": DEPTH},
        about="The number of parameters of the model cut to this depth.",
        unit="count",
        better="lower",
        section="cost",
    )
