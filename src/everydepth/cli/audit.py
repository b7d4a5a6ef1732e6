"""`everydepth audit`."""

from __future__ import annotations

from typing import Annotated

import typer

from everydepth.cli.configs import Defaults
from everydepth.cli.loading import load_to_run
from everydepth.cli.options import Model, NewRun
from everydepth.cli.showing import check_new, keep, show_table
from everydepth.cli.source import Rows


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
    """Rank samples by how likely their label is wrong, as judged by every depth of a model.

    $ everydepth audit runs/lpa --data digits --split valid --held-out
    """
    from rich.console import Console

    from everydepth.ablations import audit as judge

    check_new(run)
    console = Console()
    network = load_to_run(model)
    found = judge(rows.stream(network), rows.load(model, network), held_out=held_out)
    show_table(found.table(top=top), console)
    keep(found, run, {"model": model, **rows.asked(), "held_out": held_out}, console)
