"""Tuning in stages that can be stopped after any of them, with the CPU seconds they took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from everydepth.environment import fast_precision
from everydepth.runs.callback import Callback
from everydepth.training import EveryDepth, fit
from everydepth_papers.evidence.recipe import Cell


class Spent(Callback):
    """CPU seconds of training, checkpoints included, over all processes that worked on it."""

    def __init__(self) -> None:
        self.before, self.begin = 0.0, time.process_time()

    @property
    def seconds(self) -> float:
        return self.before + time.process_time() - self.begin

    def on_start(self, training: Any) -> None:
        self.begin = time.process_time()

    def results(self) -> Mapping[str, Any]:
        return {"cpu_seconds": self.seconds}

    def state_dict(self) -> dict[str, Any]:
        return {"cpu_seconds": self.seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.before = float(state["cpu_seconds"])


def precision_of(settings: Cell) -> str:
    """What to tune in: "fast" is whatever is fast on this CPU."""
    asked = settings.get("precision", "fp32")
    return fast_precision() if asked == "fast" else asked


def tuned(
    net: EveryDepth,
    data: Callable[[int, int], Any],
    settings: Cell,
    seed: int,
    folder: Path,
    **how: Any,
) -> float:
    """Train until the last of the `marks` (steps) of the settings; CPU seconds of all stages.

    A stage goes on from the one before with a learning rate that rises and falls again, so that
    what is measured after it is what stopping there would give. Stages that are done, or begun,
    are continued. data: what to train on from one step to another.
    """
    spent, begin = 0.0, 0
    for end in settings["marks"]:
        if end == 0:
            continue
        done = fit(
            net,
            data(begin, end),
            steps=end - begin,
            lr=settings["lr"],
            warmup=0.1,
            clip=1.0,
            seed=seed,
            run=folder / f"seed-{seed}-until-{end}",
            resume=True,
            save_every=settings["save_every"],
            keep=1,
            callbacks=[Spent()],
            precision=precision_of(settings),
            progress=False,
            **how,
        )
        spent += done.callbacks["Spent"]["cpu_seconds"]
        begin = end
    return spent
