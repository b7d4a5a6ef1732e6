"""`everydepth trace`."""

from __future__ import annotations

from typing import Annotated

import typer

from everydepth.cli.loading import load_to_run
from everydepth.cli.options import Device, Model, OwnRun
from everydepth.cli.showing import keep, place_for, show
from everydepth.cli.source import Rows


def trace(
    model: Model,
    rows: Rows,
    metrics: Annotated[
        str | None,
        typer.Option(help="Metrics or groups, separated by commas (default: all that apply)."),
    ] = None,
    run: OwnRun = None,
    depths: Annotated[
        str | None,
        typer.Option(help="'every 2nd', '20:' (from 20 on), or numbers: '4,8,12'."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="For a language model: number of predictions to sample."),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="For a language model: also show each depth's continuation of a text."),
    ] = None,
    device: Device = None,
) -> None:
    """Measure every depth of a model in one pass over the data.

    $ everydepth trace runs/lpa --data digits

    Prints a table and saves the results for `everydepth report`. Ctrl-C stops early and keeps what
    has been measured.
    """
    from rich.console import Console

    from everydepth.exits.load import load_tokenizer
    from everydepth.stream import as_stream
    from everydepth.tracing import trace as measure
    from everydepth.tracing.parameters import parameters_by_depth

    network = load_to_run(model, device)
    batches, stream = rows.load(model, network), rows.stream(network)
    asked = {
        "model": model,
        **rows.asked(),
        "metrics": metrics,
        "depths": depths,
        "tokens": tokens,
        "prompt": prompt,
    }
    place = place_for(model, run, "trace")
    wanted = None if metrics is None else [name.strip() for name in metrics.split(",")]
    found = measure(stream, batches, wanted, device=device, depths=depths, tokens=tokens)
    text = None
    if prompt is not None:
        from everydepth.tracing.language import text_at_depth, token_grid

        tokenizer = load_tokenizer(model)
        grid = token_grid(network, tokenizer, prompt)
        text = text_at_depth(network, tokenizer, [prompt])
        found = found.with_results(grid, text)
    found = found.with_results(parameters_by_depth(as_stream(stream)))
    console = Console()
    show(found, console)
    if prompt is not None and text is not None:
        for depth, (written,) in zip(text.x(), text.arrays["text"], strict=True):
            line = " ".join((prompt + str(written)).split())
            console.print(f"depth {depth}: {line}", markup=False, highlight=False)
    keep(found, place, asked, console)
