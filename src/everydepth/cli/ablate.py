"""`everydepth ablate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from everydepth.cli.options import (
    BatchSize,
    Data,
    DataRoot,
    MaxLength,
    MaxSamples,
    Model,
    NewRun,
    Split,
)

T = TypeVar("T")


def ablate(
    model: Model,
    data: Data,
    layers: Annotated[
        str | None, typer.Option(help="For example 1,2,5; by default all, one at a time.")
    ] = None,
    c: Annotated[
        str, typer.Option(help="Factors on the skip; 0 removes it.")
    ] = "0,0.25,0.5,0.75,1",
    which: Annotated[
        str, typer.Option(help="both, attention, cross_attention, mlp or conv.")
    ] = "both",
    out: NewRun = None,
    split: Split = "test",
    data_root: DataRoot = None,
    max_samples: MaxSamples = None,
    batch_size: BatchSize = 32,
    max_length: MaxLength = 128,
) -> None:
    """Scale or remove the skip connections of each layer of a trained model, and see what is lost.

    everydepth ablate runs/lpa --data digits -o runs/ablation
    """
    from everydepth.ablations import ablate as sweep
    from everydepth.ablations.skips import checked_which
    from everydepth.cli.loading import load_batches
    from everydepth.exits.load import load as load_model
    from everydepth.runs import Run

    chosen = None if layers is None else [number(part, int) for part in layers.split(",")]
    scales = [number(part, float) for part in c.split(",")]
    kind = checked_which(which)
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
    config = {"model": model, "data": data, "split": split, "c": scales, "which": which}
    run = None if out is None else Run.create(out, config, kind="ablate")
    found = sweep(network, rows, layers=chosen, c=scales, which=kind)
    for metric in ("accuracy", "perplexity", "loss", "margin", "agreement"):
        if metric in found.metrics:
            typer.echo(f"{found.table(metric)}\n")
    if run is not None:
        found.save(run.path / "ablation")
        typer.echo(f"wrote {run.path}; see it with: everydepth report {run.path}")


def number(text: str, kind: Callable[[str], T]) -> T:
    from everydepth.errors import SettingError

    try:
        return kind(text)
    except ValueError as error:
        raise SettingError(
            f"{text.strip()!r} is not a number; separate numbers by commas, as in 0,0.5,1"
        ) from error
