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

WORDS = 8192  # of SmolLM2's 49,152 words: a third of the training time


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
    """Add exits to a frozen model: usable at some depths, and unchanged bit for bit at the last.

    At each depth, one or more new blocks of the model's kind, a balcony, sit between the state and
    the model's norm and head; `fit` trains all of them in one pass. Every verb uses a balcony like
    any depth. With m blocks, depth k is exported as a plain model of k + m blocks. In a ResNet, a
    balcony begins with the first block of each later stage, so that its states are those of the
    last stage, which the head expects; the export then has fewer blocks in these stages.

    depths: below the last; by default L/4, L/2 and 3L/4.
    objective: by default `ladder(depths, early=1).distilled(labels=False, words=8192)`: predict
        what the last depth predicts. Any text or images will do; no labels needed.
    blocks: per balcony; by default one for every ten of the model, and at least one.
    init: "last" starts a balcony as a copy of the last blocks of its shape, which turn states into
        predictions. "copy" starts each block as a copy of the one before it with its output zeroed,
        so that it changes nothing until trained. "fresh" is like "copy", with the model's own
        initialization. Post-norm models support only "last".
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
