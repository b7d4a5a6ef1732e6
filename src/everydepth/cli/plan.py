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
    import csv

    from everydepth.errors import DataError
    from everydepth.growth import scaling
    from everydepth.runs import Run

    law = scaling.EPOCH
    columns: dict[str, list[float]] | None = None
    if points is not None:
        try:
            with open(points, encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            columns = {
                name: [float(row[name]) for row in rows]
                for name in ("parameters", "tokens", "loss")
            }
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise DataError(
                f"{points} cannot be read as points ({type(error).__name__}: {error}); give a CSV "
                "file with the columns parameters, tokens and loss, in numbers"
            ) from error
        law = scaling.fit(columns["parameters"], columns["loss"], columns["tokens"], bootstrap=100)
        if not as_json:
            typer.echo(str(law))
    found = scaling.plan(asked, law=law)
    if run is not None:
        outcome = {"fit": law.to_json(), "points": columns, "plan": found.to_json()}
        Run.create(run, plain(asked), kind="plan").write_results({"scaling": outcome})
    typer.echo(json.dumps({"law": law.values, **found.to_json()}) if as_json else str(found))
