"""Exits beside a frozen model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from everydepth.objectives import Objective, ladder
from everydepth.objectives.shapes import Ladder
from everydepth.stream import Balcony, ResidualStream, as_stream
from everydepth.training.module import EveryDepth


def balcony(
    model: nn.Module | ResidualStream,
    depths: Sequence[int] | None = None,
    *,
    objective: Objective | None = None,
    init: str = "copy",
    **options: Any,
) -> EveryDepth:
    """A network that is usable at some depths and at the last is `model`, bit for bit.

    The model is frozen. At each of the depths one block of its own kind stands between the state
    and the model's norm and head; it starts silent, and `fit` trains all of them in one pass. Every
    verb uses a balcony as it uses a depth; depth k is exported as a plain model of k + 1 blocks.

    depths: below the last; by default a quarter, a half and three quarters of the blocks.
    objective: by default `ladder(depths, early=1).distilled(labels=False)`: to say what the last
        depth says. Any text or images will do; labels are not needed.
    init: "copy", each block starts as the one before it, but for its last maps, which are zero;
        "fresh", by the model's own initialization.
    options: passed to `as_stream`.

    >>> net = ed.balcony(model, [1, 2])
    >>> done = ed.fit(net, train, valid, steps=2, progress=False)
    >>> images = test.pixel_values[:4]
    >>> torch.equal(net.model(images).logits, model(images).logits)
    True
    >>> ed.at_depth(net, 1).config.num_hidden_layers  # the first block and its balcony
    2
    """
    stream = as_stream(model, **options)
    rungs = Ladder().rungs(stream.depth) if depths is None else depths
    made = Balcony(stream, rungs, init=init)
    goal = ladder(rungs, early=1.0).distilled(labels=False) if objective is None else objective
    return EveryDepth(made, goal)
