"""`everydepth ablate`."""

from __future__ import annotations

from typing import Annotated

import typer

from everydepth.ablations.config import AblateConfig
from everydepth.cli.configs import Defaults
from everydepth.cli.options import Model, NewRun, Source, Split
from everydepth.config import plain


def ablate(
    model: Model,
    source: Source,
    asked: Annotated[AblateConfig, Defaults({"batch_size": 32})],
    run: NewRun = None,
    split: Split = "test",
) -> None:
    """Scale or remove the skip connections of each layer of a trained model, and see what is lost.

    everydepth ablate runs/lpa --data digits -o runs/ablation
    """
    from everydepth.ablations import ablate as sweep
    from everydepth.exits.load import load as load_model
    from everydepth.runs import Run

    network = load_model(model)
    rows = source.batches(model, network, split=split, batch_size=asked.batch_size or 32)
    config = {"model": model, "data": source.data, "split": split, **plain(asked)}
    opened = None if run is None else Run.create(run, config, kind="ablate")
    found = sweep(network, rows, config=asked)
    for metric in ("accuracy", "perplexity", "loss", "margin", "agreement"):
        if metric in found.metrics:
            typer.echo(f"{found.table(metric)}\n")
    if opened is not None:
        found.save(opened.path / "ablation")
        typer.echo(f"wrote {run}; see it with: everydepth report {run}")
