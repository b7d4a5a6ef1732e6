"""`everydepth plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from everydepth.config import plain
from everydepth.growth.config import PlanConfig


def plan(
    asked: PlanConfig,
    points: Annotated[
        Path | None,
        typer.Option(
            help="A CSV file with columns parameters, tokens, loss: fit your own scaling law first."
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", "-o", help="Also write a run directory, for `everydepth report`."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan depth, width and data for a model size or a compute budget.

    $ everydepth plan --parameters 7e9

    Uses Epoch's refit of the Chinchilla scaling law, or fits one to --points, and shows what
    published models of similar size chose.
    """
    from everydepth.data import load_columns
    from everydepth.growth import scaling
    from everydepth.runs import Run

    law = scaling.EPOCH
    columns: dict[str, list[float]] | None = None
    if points is not None:
        table = load_columns(points)
        columns = {name: table.numbers(name).tolist() for name in ("parameters", "tokens", "loss")}
        law = scaling.fit(columns["parameters"], columns["loss"], columns["tokens"], bootstrap=100)
        if not as_json:
            typer.echo(str(law))
    found = scaling.plan(asked, law=law)
    if run is not None:
        Run.create(run, plain(asked), kind="plan")
        scaling.as_results(law, found, columns).save(run / "scaling")
    typer.echo(json.dumps({"law": law.values, **found.to_json()}) if as_json else str(found))
