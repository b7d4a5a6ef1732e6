"""What the checks of inputs and of finite numbers cost a training step and a trace.

    python benchmarks/checks.py

The same work with the checks and without, in turns, in CPU seconds of one thread. Steps are those
of training_step.py; a trace asks for the loss alone, which leaves checks the largest share. Written
to benchmarks/results/checks.json: the ratio of the smallest and of the median times, for the noise
of this machine the ratio of the odd to the even rounds without checks, and what the checks take by
themselves: the CPU time inside of them over that of the whole. The last hardly varies; ratios of
two runs do by several percent where other processes use the same caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from record import no_options, record_times, sized
from rich.console import Console
from rich.table import Table
from training_step import llama, vit

import everydepth as ed
from everydepth.stream import ResidualStream, States, targets
from everydepth.tracing import predictions, run

ROUNDS = sized(24, 2)
WANTED = 1.01
# By place, what stands there without the check: it gives what the check gives when all is well.
OFF: tuple[tuple[Any, str, Any], ...] = (
    (ResidualStream, "check_batch", lambda self, batch: batch),
    (ResidualStream, "check_depth", lambda self, depth, *, lowest=0: depth),
    (ResidualStream, "_check_observed", lambda self, h: None),
    (targets, "_check_task", lambda stream: None),
    (targets, "_checked", lambda stream, batch, labels: (labels.long(), False)),
    (targets, "_check_classes", lambda stream, labels: None),
    (targets, "_check_unshifted", lambda batch, labels: None),
    (States, "check_finite", lambda self: self),
    (States, "check_predictions", lambda self, lowest=1: self),
    (run._Run, "_check", lambda self, o: None),
    (predictions, "_is_finite", lambda o, found: True),
)


@contextmanager
def unchecked() -> Generator[None, None, None]:
    held = [(owner, name, vars(owner)[name]) for owner, name, _ in OFF]
    for owner, name, nothing in OFF:
        setattr(owner, name, nothing)
    try:
        yield
    finally:
        for owner, name, check in held:
            setattr(owner, name, check)


@contextmanager
def timed(spent: list[int]) -> Generator[None, None, None]:
    """Add the CPU nanoseconds inside of checks to `spent`, those of one within another once."""
    inside = 0

    def counting(check: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **named: Any) -> Any:
            nonlocal inside
            begin, inside = time.thread_time_ns(), inside + 1
            try:
                return check(*args, **named)
            finally:
                inside -= 1
                if not inside:
                    spent.append(time.thread_time_ns() - begin)

        return called

    held = [(owner, name, vars(owner)[name]) for owner, name, _ in OFF]
    for owner, name, check in held:
        setattr(owner, name, counting(check))
    try:
        yield
    finally:
        for owner, name, check in held:
            setattr(owner, name, check)


def share(work: Callable[[], Any]) -> float:
    """What checks take of a piece of work: the median over some rounds."""
    found: list[float] = []
    for _ in range(max(2, ROUNDS // 3)):
        spent: list[int] = []
        with timed(spent):
            begin = time.thread_time_ns()
            work()
            found.append(sum(spent) / (time.thread_time_ns() - begin))
    return statistics.median(found)


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


def seconds(work: Callable[[], Any], *, checks: bool) -> float:
    with nullcontext() if checks else unchecked():
        begin = time.process_time()
        work()
        return time.process_time() - begin


def main() -> None:
    torch.set_num_threads(1)
    figures: dict[str, dict[str, float]] = {}
    table = Table(title=f"CPU seconds with checks over those without; {WANTED} is wanted")
    for column in ("", "smallest", "median", "noise", "inside"):
        table.add_column(column, justify="right")
    for name, work in works().items():
        work()  # looks the model over
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(ROUNDS):
            for checks in (True, False) if number % 2 else (False, True):
                times[checks].append(seconds(work, checks=checks))
        on, off = times[True], times[False]
        found = {
            "smallest": min(on) / min(off),
            "median": statistics.median(on) / statistics.median(off),
            "noise": statistics.median(off[1::2]) / statistics.median(off[::2]),
            "inside": share(work),
        }
        figures[name] = found
        table.add_row(name, *(f"{found[column]:.4f}" for column in found))
    Console().print(table)
    record_times("checks", {"rounds": ROUNDS, "wanted": WANTED, **figures})


if __name__ == "__main__":
    no_options()
    main()
