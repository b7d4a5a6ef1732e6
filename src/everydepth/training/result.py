"""What a training came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everydepth.training.scoring import Scores

FINISHED = "finished"


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a training came to.

    stopped: "finished", or why it ended before the last step.
    valid: by metric, the last validation's value at depth 1, 2, ..., L; empty without validation.
    best_step, best_value: of the early-stopping metric (the last depth's loss, if none was given).
    callbacks: by class name, what each callback reports.
    history: the metrics, in the order in which they were logged.
    path: the run directory, if there is one; the model is in its folder `model`.

    >>> net = ed.EveryDepth(model, ed.lpa())
    >>> done = ed.fit(net, train, valid, steps=3, progress=False)
    >>> done.steps, done.stopped, len(done.valid["accuracy"])  # one accuracy a depth
    (3, 'finished', 3)
    """

    steps: int
    epochs: int
    stopped: str
    seconds: float
    valid: Scores = field(default_factory=dict)
    best_step: int | None = None
    best_value: float | None = None
    callbacks: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list, repr=False)
    path: Path | None = None
