"""`everydepth trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everydepth.cli.options import (
    BatchSize,
    Data,
    DataRoot,
    Device,
    MaxLength,
    MaxSamples,
    Model,
    Split,
)
from everydepth.cli.showing import keep, place_for, show


def trace(
    model: Model,
    data: Data,
    metrics: Annotated[
        str | None,
        typer.Option(help="Metrics or groups, separated by commas; by default all that fit."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="A new run directory; by default the model's own run, or runs/trace-<model>.",
        ),
    ] = None,
    split: Split = "test",
    data_root: DataRoot = None,
    max_samples: MaxSamples = None,
    batch_size: BatchSize = 32,
    max_length: MaxLength = 128,
    prompt: Annotated[
        str | None,
        typer.Option(help="For a language model: what each depth would say after this text."),
    ] = None,
    device: Device = None,
) -> None:
    """Measure every depth of a model on data, in one pass.

    everydepth trace runs/lpa --data digits

    Prints a table, and writes what `everydepth report` shows. Ctrl-C stops early and keeps what was
    measured.
    """
    from rich.console import Console

    from everydepth.cli.loading import load_batches
    from everydepth.exits.load import load as load_model
    from everydepth.exits.load import load_tokenizer
    from everydepth.stream import as_stream
    from everydepth.tracing import trace as measure
    from everydepth.tracing.parameters import parameters_by_depth

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
    asked = {
        "model": model,
        "data": data,
        "split": split,
        "metrics": metrics,
        "max_samples": max_samples,
        "batch_size": batch_size,
        "max_length": max_length,
        "prompt": prompt,
    }
    place = place_for(model, out, "trace")
    wanted = None if metrics is None else [name.strip() for name in metrics.split(",")]
    found = measure(network, rows, wanted, device=device)
    if prompt is not None:
        from everydepth.tracing.language import text_at_depth, token_grid

        tokenizer = load_tokenizer(model)
        grid = token_grid(network, tokenizer, prompt)
        text = text_at_depth(network, tokenizer, [prompt])
        found = found.with_results(grid, text)
    found = found.with_results(parameters_by_depth(as_stream(network)))
    console = Console()
    show(found, console)
    keep(found, place, asked, console)
