"""`everydepth audit`."""

from __future__ import annotations

from typing import Annotated

import typer

from everydepth.cli.configs import Defaults
from everydepth.cli.options import Model, NewRun, Rows


def audit(
    model: Model,
    rows: Annotated[Rows, Defaults({"split": "train"})],
    held_out: Annotated[
        bool,
        typer.Option(
            "--held-out", help="The model was not trained on this data: scores are probabilities."
        ),
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="How many rows to show.")] = 20,
    run: NewRun = None,
) -> None:
    """Rank samples by how likely their label is wrong, judged by every depth of a model.

    everydepth audit runs/lpa --data digits --split valid --held-out
    """
    from rich.console import Console

    from everydepth.ablations import audit as judge
    from everydepth.exits.load import load as load_model
    from everydepth.runs import Run

    network = load_model(model)
    batches = rows.load(model, network)
    config = {"model": model, "data": rows.data, "split": rows.split, "held_out": held_out}
    opened = None if run is None else Run.create(run, config, kind="audit")
    found = judge(network, batches, held_out=held_out)
    console = Console()
    console.print(found.table(top=top))
    if opened is not None:
        found.save(opened.path / "audit")
        console.print(f"wrote {run}; see it with: everydepth report {run}", markup=False)
