"""`everydepth trace`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from everydepth.environment import command_line

if TYPE_CHECKING:
    from rich.table import Table

    from everydepth.stream import ResidualStream
    from everydepth.tracing import Trace

_BLOCKS = "▁▂▃▄▅▆▇█"


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
    from everydepth.runs import Run
    from everydepth.stream import as_stream
    from everydepth.tracing import trace as measure

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
    config = {
        "command": command_line(),
        "model": model,
        "data": data,
        "split": split,
        "metrics": metrics,
        "max_samples": max_samples,
        "batch_size": batch_size,
        "max_length": max_length,
        "prompt": prompt,
    }
    place = _place(model, out)
    wanted = None if metrics is None else [name.strip() for name in metrics.split(",")]
    found = measure(network, rows, wanted, device=device)
    if prompt is not None:
        from everydepth.tracing.language import text_at_depth, token_grid

        tokenizer = load_tokenizer(model)
        grid = token_grid(network, tokenizer, prompt)
        text = text_at_depth(network, tokenizer, [prompt])
        found = found.with_results(grid, text)
    parameters = parameters_by_depth(as_stream(network))
    found = found.with_about(
        command=config["command"], asked=config, parameters_by_depth=parameters
    )
    run = place if Run.exists(place) else Run.create(place, config, kind="trace").path
    found.save(run / "trace")
    console = Console()
    console.print(str(found))
    console.print(table(found))
    for name, result in found.results.items():
        if result.note:
            console.print(f"{name}: {result.note}", markup=False, style="yellow")
    console.print(f"wrote {run / 'trace'}; see it with: everydepth report {run}", markup=False)


def _place(model: str, out: Path | None) -> Path:
    """Where the trace goes; checked before the work, so that a bad place is not found out after."""
    from everydepth.errors import RunError
    from everydepth.runs import Run

    if out is None and Run.exists(model) and (Path(model) / "model").is_dir():
        return Path(model)
    place = out or _free(Path("runs") / f"trace-{Path(model).resolve().name}")
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise RunError(f"{place} is not an empty directory; use another one with --out")
    return place


def table(found: Trace) -> Table:
    """One row per curve: how it runs over the depths, and its lowest, highest and last value."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column("metric", no_wrap=True, overflow="ellipsis")
    # Where the terminal is narrow this one is folded: numbers are never cut.
    shown.add_column(f"depth 0 to {found.depth}", overflow="fold")
    for title in ("lowest", "highest", "last"):
        shown.add_column(title, justify="right", no_wrap=True, min_width=8)
    for name, column in found.columns().items():
        values = [value for value in column if value is not None and math.isfinite(value)]
        if values:
            cells = [f"{number:.4g}" for number in (min(values), max(values), values[-1])]
            # A metric's further series stand below it. Text, not markup: a name may hold brackets.
            metric, _, series = name.partition(".")
            shown.add_row(
                Text(f"  {series}" if series else metric), Text(sparkline(column)), *cells
            )
    return shown


def sparkline(values: Sequence[float | None]) -> str:
    """A block per value, as high as the value among the others; blank where there is none."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)

    def block(value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return " "
        return _BLOCKS[round((value - low) / span * (len(_BLOCKS) - 1)) if span else 0]

    return "".join(map(block, values))


def parameters_by_depth(stream: ResidualStream) -> list[int]:
    """Parameters that a model cut to depth 0..L keeps: all but those of later blocks alone."""
    blocks = [{id(p) for p in block.module.parameters()} for block in stream.blocks]
    size = {id(p): p.numel() for p in stream.model.parameters()}
    found: list[int] = []
    for depth in range(stream.depth + 1):
        kept = set(size) - set[int]().union(*blocks[depth:]) | set[int]().union(*blocks[:depth])
        found.append(sum(size[key] for key in kept))
    return found


def _free(path: Path) -> Path:
    """The path, or the first of path-2, path-3, ... that is not taken."""
    free, count = path, 1
    while free.exists():
        count += 1
        free = path.with_name(f"{path.name}-{count}")
    return free
