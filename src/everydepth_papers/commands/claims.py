"""`everydepth claims`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everydepth.runs.engine import EngineConfig


def claims(
    where: EngineConfig,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's folder, a run directory, or a Hugging Face name; by default the "
            "standard small networks are trained and asked."
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="With a model: data by name, a file or a folder.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Names of claims, separated by commas.")] = None,
    paper: Annotated[
        str | None,
        typer.Option(
            help="Claims of one paper, by its key: progressive, expansion, tracing, one_layer or "
            "residual."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Training runs of each standard network.")] = 3,
    preset: Annotated[
        str, typer.Option(help="standard, or smoke: seconds, to see that it runs.")
    ] = "standard",
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", "-o", help="A run directory; one that exists is continued (runs/claims)."
        ),
    ] = None,
    finished: Annotated[
        bool,
        typer.Option(
            "--finished", help="Train nothing: judge every claim by the seeds that --run has."
        ),
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="Print the claims and stop.")] = False,
    record: Annotated[
        Path | None,
        typer.Option(help="Also write the ledger with machine and versions to this JSON file."),
    ] = None,
    docs: Annotated[
        Path | None, typer.Option(help="Also write the ledger to this Markdown page.")
    ] = None,
    split: Annotated[str, typer.Option(help="Which part of the data.")] = "test",
    data_root: Annotated[
        str | None, typer.Option(help="The folder that holds named data sets.")
    ] = None,
    max_samples: Annotated[int, typer.Option(min=1, help="Use only the first N rows.")] = 1024,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    max_length: Annotated[int, typer.Option(min=1, help="Longest text, in tokens.")] = 128,
) -> None:
    """Which claims of the papers hold? A ledger, measured.

    Standard networks: everydepth claims. Your own: everydepth claims runs/lpa --data digits
    """
    import json

    from rich.console import Console

    from everydepth.files import write_text
    from everydepth_papers.claims.catalog import CLAIMS
    from everydepth_papers.claims.checking import check_claims
    from everydepth_papers.paper import paper as paper_of

    console = Console()
    if listed:
        for claim in CLAIMS.values():
            console.print(f"{paper_of(claim.paper)}: [bold]{claim.name}[/]: {claim.statement}")
        return
    names = None if only is None else [part.strip() for part in only.split(",")]
    network, rows, about = None, None, {}
    if model is not None and data is not None:
        from everydepth.cli.loading import load_batches
        from everydepth.exits.load import load as load_model

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
        about = {"model": model, "data": data, "split": split}
    elif model is not None or data is not None:
        from everydepth.errors import SettingError

        given, absent = ("a model", "--data") if data is None else ("--data", "a model")
        raise SettingError(
            f"{given} without {absent}; give both to ask your own model, or neither for the "
            "standard networks"
        )
    if run is None:
        name = "claims" if preset == "standard" else f"claims-{preset}"
        run = Path("runs") / (name if model is None else f"claims-{Path(model).name}")
    found = check_claims(
        network,
        rows,
        only=names,
        paper=paper,
        seeds=seeds,
        preset=preset,
        run=run,
        finished=finished,
        where=where,
        max_samples=max_samples,
        about=about,
    )
    console.print(found.table("claim"))
    console.print(found.table("measured"))
    if record is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        write_text(record, json.dumps(dict(found.about), indent=1) + "\n")
    if docs is not None:
        write_text(docs, found.markdown())
    typer.echo(f"wrote {run}; see it with: everydepth report {run}")
