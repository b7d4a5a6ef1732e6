"""`everydepth profile`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from everydepth.cli.options import Model, OwnRun
from everydepth.cli.showing import keep, place_for, show
from everydepth.cli.source import Rows


def profile(
    model: Model,
    rows: Rows,
    run: OwnRun = None,
    depths: Annotated[
        str | None, typer.Option(help="'every 2nd', '20:' (from 20 on), or numbers: '4,8,12'.")
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Timed passes; by default 2 to 10, as many as fit in 2 seconds."),
    ] = None,
    tokens: Annotated[
        str,
        typer.Option(
            metavar="some|all",
            help="For a large vocabulary: 'all' reads every depth at every token, not at a sample.",
        ),
    ] = "some",
    latency_ms: Annotated[
        float | None, typer.Option(help="Budget: milliseconds for one row.")
    ] = None,
    max_bytes: Annotated[int | None, typer.Option(help="Budget: bytes of the checkpoint.")] = None,
    max_drop: Annotated[
        float | None, typer.Option(help="Budget: acceptable loss of quality, in the metric's unit.")
    ] = None,
    min_accuracy: Annotated[float | None, typer.Option(help="Budget: lowest accuracy.")] = None,
) -> None:
    """Measure the quality, size and speed of every depth, and choose one for a budget.

    $ everydepth profile runs/lpa --data digits --max-drop 0.01

    Writes the folder profile, which `everydepth export --profile` adds to the model card, and
    profile.png.
    """
    from rich.console import Console

    from everydepth.exits import profile as measure
    from everydepth.exits.load import load as load_model

    network = load_model(model)
    batches = rows.load(model, network)
    place = place_for(model, run, "profile")
    reading: Any = tokens
    found = measure(
        rows.stream(network),
        batches,
        batch_size=rows.batch_size,
        depths=depths,
        repeats=repeats,
        tokens=reading,
    )
    console = Console()
    show(found, console)
    asked = {"model": model, **rows.asked(), "depths": depths, "repeats": repeats}
    asked["tokens"] = tokens
    keep(found, place, asked, console)
    drawn = found.figure(["tradeoff", "batch_latency", "checkpoint_bytes"])
    drawn.savefig(place / "profile.png", dpi=150)
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
