"""What the checks of inputs and of finite numbers take of a training step and of a trace.

    python benchmarks/checks.py

The share of the CPU seconds of a step, or of a trace, that is spent inside checks, counted in the
same run: on a shared machine two runs with and without them differ by more than they cost. Steps
are those of training_step.py; a trace asks for the loss alone, which leaves checks the
largest share. Smallest and median of many rounds, one compute thread. Written to
benchmarks/results/checks.json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from record import record, sized
from rich.console import Console
from rich.table import Table
from training_step import llama, vit

import everydepth as ed
from everydepth.stream import ResidualStream, States, targets
from everydepth.tracing import predictions, run

ROUNDS = sized(12, 1)
WANTED = 0.01  # of the time
CHECKS: tuple[tuple[Any, str], ...] = (
    *((ResidualStream, name) for name in ("check_batch", "check_labels", "check_depth")),
    *((ResidualStream, name) for name in ("_check_tokens", "_check_observed")),
    *((targets, name) for name in ("_check_task", "_checked", "_check_classes")),
    *((States, name) for name in ("check_finite", "check_predictions")),
    (run._Run, "_check"),
    (predictions, "_says_something"),
)


class Stopwatch:
    """CPU seconds inside checks; a check that another one calls is not counted twice."""

    def __init__(self) -> None:
        self.seconds, self._inside = 0.0, False

    def around(self, check: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(check)
        def timed(*args: Any, **named: Any) -> Any:
            if self._inside:
                return check(*args, **named)
            self._inside, begin = True, time.thread_time()
            try:
                return check(*args, **named)
            finally:
                self._inside = False
                self.seconds += time.thread_time() - begin

        return timed

    def watch(self) -> None:
        for owner, name in CHECKS:
            held = vars(owner)[name]
            inner = held.__func__ if isinstance(held, staticmethod) else held
            found = self.around(inner)
            setattr(owner, name, staticmethod(found) if isinstance(held, staticmethod) else found)


def works() -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    seeing, pictures = vit()
    reading, texts = llama()
    nets = {
        "step of a ViT": (ed.EveryDepth(seeing, ed.lpa()).train(), pictures),
        "step of a Llama": (ed.EveryDepth(reading, ed.lpa()).train(), texts),
    }
    found: dict[str, Callable[[], Any]] = {
        name: lambda net=net, batch=batch: net(**batch).loss.backward()
        for name, (net, batch) in nets.items()
    }
    for name, build in (("trace of a ViT", vit), ("trace of a Llama", llama)):
        model, batch = build()
        model.eval()
        many = {key: value.repeat(4, *[1] * (value.ndim - 1)) for key, value in batch.items()}
        found[name] = lambda model=model, many=many: ed.trace(model, many, ["loss"], progress=False)
    return found


def main() -> None:
    torch.set_num_threads(1)
    stopwatch = Stopwatch()
    stopwatch.watch()
    found = works()
    shares: dict[str, list[float]] = {name: [] for name in found}
    for number in range(ROUNDS + 1):
        for name, work in found.items():
            stopwatch.seconds, begin = 0.0, time.process_time()
            work()
            spent = time.process_time() - begin
            if number:  # the first one looks the model over
                shares[name].append(stopwatch.seconds / spent)
    table = Table(title=f"Share of checks in CPU seconds; at most {WANTED:.0%} is wanted")
    for column in ("", "smallest", "median"):
        table.add_column(column, justify="right")
    for name, each in shares.items():
        table.add_row(name, f"{min(each):.3%}", f"{statistics.median(each):.3%}")
    Console().print(table)
    record(
        "checks",
        {
            "rounds": ROUNDS,
            "wanted": WANTED,
            **{k: {"smallest": min(v), "median": statistics.median(v)} for k, v in shares.items()},
        },
    )


if __name__ == "__main__":
    main()
