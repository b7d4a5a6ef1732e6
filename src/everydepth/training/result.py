"""What a run came to."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from transformers.utils import logging

from everydepth.runs import Run
from everydepth.stream import unwrapped
from everydepth.training.module import EveryDepth
from everydepth.training.scoring import Scores

FINISHED = "finished"


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a run came to.

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


def write_result(run: Run, result: FitResult, net: EveryDepth, state: dict[str, Tensor]) -> None:
    """The plain model and the outcome, into the run directory."""
    plain = unwrapped(net.model)
    if hasattr(plain, "save_pretrained") and not (run.path / "model").exists():
        own = {k: v for k, v in state.items() if not (net.heads and k.startswith("heads."))}
        with _no_progress_bars():
            run.write_folder("model", lambda folder: net.save_pretrained(folder, state_dict=own))
    run.write_results({k: v for k, v in asdict(result).items() if k not in ("history", "path")})


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values with names such as `valid/accuracy/3`, as trackers want them."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat(cast(Mapping[str, Any], value), f"{name}/")
        elif isinstance(value, (list, tuple)):
            items = enumerate(cast(Sequence[Any], value), start=1)
            found |= flat({str(i): item for i, item in items}, f"{name}/")
        elif value is not None:
            found[name] = value
    return found


@contextmanager
def _no_progress_bars() -> Generator[None, None, None]:
    """Silence what transformers shows while it saves."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
