"""`everydepth profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everydepth.cli.options import BatchSize, Data, DataRoot, MaxLength, MaxSamples, Model, Split
from everydepth.environment import command_line


def profile(
    model: Model,
    data: Data,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="A new run directory; by default the model's own run, or runs/profile-<model>.",
        ),
    ] = None,
    split: Split = "test",
    data_root: DataRoot = None,
    max_samples: MaxSamples = None,
    batch_size: BatchSize = 32,
    max_length: MaxLength = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls a depth.")] = 10,
    latency_ms: Annotated[float | None, typer.Option(help="Budget: one row, milliseconds.")] = None,
    max_bytes: Annotated[int | None, typer.Option(help="Budget: bytes of the checkpoint.")] = None,
    max_drop: Annotated[
        float | None, typer.Option(help="Quality that may be lost, in units of the metric.")
    ] = None,
    min_accuracy: Annotated[float | None, typer.Option(help="Accuracy that is needed.")] = None,
) -> None:
    """Measure quality, size and speed of every depth, and choose one for a budget.

    everydepth profile runs/lpa --data digits --max-drop 0.01

    Writes the folder profile and profile.png; give the first to `everydepth export` for its card.
    """
    from rich.console import Console

    from everydepth.cli.loading import load_batches
    from everydepth.exits import profile as measure
    from everydepth.exits.load import load as load_model
    from everydepth.runs import Run

    network = load_model(model)
    rows = load_batches(
        model,
        network,
        data,
        split=split,
        root=data_root,
        batch_size=batch_size,
        max_length=max_length,
        max_samples=max_samples,
    )
    own = out is None and Run.exists(model)
    place = Path(model) if own else out or _free(f"profile-{Path(model).resolve().name}")
    if not own:
        config = {
            "command": command_line(),
            "model": model,
            "data": data,
            "split": split,
            "max_samples": max_samples,
            "batch_size": batch_size,
        }
        place = Run.create(place, config, kind="profile").path
    found = measure(network, rows, batch_size=batch_size, repeats=repeats)
    found.save(place / "profile")
    found.figure(["tradeoff", "batch_latency", "checkpoint_bytes"]).savefig(
        place / "profile.png", dpi=150
    )
    console = Console()
    console.print(found.table())
    console.print(f"wrote {place / 'profile'} and profile.png", markup=False)
    limits = {
        "latency_ms": latency_ms,
        "bytes": max_bytes,
        "max_drop": max_drop,
        "min_accuracy": min_accuracy,
    }
    if any(limit is not None for limit in limits.values()):
        depth = found.choose(**limits)
        console.print(
            f"depth {depth} fits the budget; write it with: everydepth export {model} DIRECTORY "
            f"--depth {depth}",
            markup=False,
        )


def _free(name: str) -> Path:
    """runs/name, or the first of runs/name-2, runs/name-3, ... that is not taken."""
    free, count = Path("runs") / name, 1
    while free.exists():
        count += 1
        free = Path("runs") / f"{name}-{count}"
    return free
