"""Exits beside a frozen model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from everydepth.config import checked
from everydepth.objectives import Objective, ladder
from everydepth.objectives.shapes import Ladder
from everydepth.stream import Balcony, ResidualStream, as_stream
from everydepth.training.module import EveryDepth

WORDS = 8192  # of SmolLM2's 49,152 they took a third of the time


@checked
def balcony(
    model: nn.Module | ResidualStream,
    depths: Sequence[int] | None = None,
    *,
    objective: Objective | None = None,
    blocks: int | None = None,
    init: str = "last",
    **options: Any,
) -> EveryDepth:
    """A network that is usable at some depths and at the last is `model`, bit for bit.

    The model is frozen. At each of the depths one or more blocks of its own kind stand between the
    state and the model's norm and head, and `fit` trains all of them in one pass. Every verb uses a
    balcony as it uses a depth; with m blocks, depth k is exported as a plain model of k + m blocks.
    In a ResNet the first blocks of later stages stand before those m: so a balcony gives states of
    the last stage, for which the head was made, and is exported with fewer blocks in these stages.

    depths: below the last; by default a quarter, a half and three quarters of the blocks.
    objective: by default `ladder(depths, early=1).distilled(labels=False, words=8192)`: to say what
        the last depth says. Any text or images will do; labels are not needed.
    blocks: how many a balcony has; by default one for every ten of the model, and at least one.
    init: "last", a balcony starts as a copy of the last blocks of its shape, which turn states into
        predictions; "copy", each block starts as the one before it, but for its last maps, which
        are zero, so that nothing changes before it is trained; "fresh", as "copy", by the model's
        own initialization. Post-norm models have no silent blocks, so there "last" is the only one.
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
    count = max(1, stream.depth // 10) if blocks is None else blocks
    made = Balcony(stream, rungs, blocks=count, init=init)
    goal = ladder(rungs, early=1.0).distilled(labels=False, words=WORDS)
    goal = goal if objective is None else objective
    return EveryDepth(made, goal)
