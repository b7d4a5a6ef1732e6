"""`everydepth audit`."""

from __future__ import annotations

from typing import Annotated

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


def audit(
    model: Model,
    data: Data,
    held_out: Annotated[
        bool,
        typer.Option(
            "--held-out", help="The model was not trained on this data: scores are probabilities."
        ),
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="How many rows to show.")] = 20,
    out: NewRun = None,
    split: Split = "train",
    data_root: DataRoot = None,
    max_samples: MaxSamples = None,
    batch_size: BatchSize = 32,
    max_length: MaxLength = 128,
) -> None:
    """Rank samples by how likely their label is wrong, judged by every depth of a model.

    everydepth audit runs/lpa --data digits --split valid --held-out
    """
    from rich.console import Console

    from everydepth.ablations import audit as judge
    from everydepth.cli.loading import load_batches
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
    config = {"model": model, "data": data, "split": split, "held_out": held_out}
    run = None if out is None else Run.create(out, config, kind="audit")
    found = judge(network, rows, held_out=held_out)
    console = Console()
    console.print(found.table(top=top))
    if run is not None:
        found.save(run.path / "audit")
        console.print(f"wrote {run.path}; see it with: everydepth report {run.path}", markup=False)
