"""`everydepth claims`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everydepth.runs.engine import EngineConfig

if TYPE_CHECKING:
    from rich.console import Console

    from everydepth.results import Table
    from everydepth_papers.claims.ledger import Ledger


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
        typer.Option(
            help="Also write the ledger with machine and versions to this JSON file; with --only "
            "or --paper, replace those claims in it."
        ),
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
    """Measure which claims of the papers hold, for standard networks or your own.

    $ everydepth claims
    $ everydepth claims runs/lpa --data digits
    """
    import json

    from rich.console import Console

    from everydepth.cli.showing import show_table
    from everydepth.files import read_json, write_text
    from everydepth_papers.claims.checking import check_claims

    console = Console()
    if listed:
        _list(console)
        return
    names = None if only is None else [part.strip() for part in only.split(",")]
    network, rows, about = None, None, {}
    if model is not None and data is not None:
        from everydepth.cli.source import Source
        from everydepth.exits.load import load as load_model

        network = load_model(model)
        source = Source(
            data=data, data_root=data_root, max_samples=max_samples, max_length=max_length
        )
        rows = source.batches(model, network, split=split, batch_size=batch_size)
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
    show_table(_verdicts(found), console)
    if record is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        if (only or paper) and record.is_file():
            found = found.within(read_json(record))
        write_text(record, json.dumps(dict(found.about), indent=1) + "\n")
    if docs is not None:
        write_text(docs, found.markdown())
    typer.echo(f"wrote {run}; see it with: everydepth report {run}")


def _list(console: Console) -> None:
    """Every claim with its statement, paper by paper."""
    from rich.table import Table as RichTable
    from rich.text import Text

    from everydepth_papers.claims.catalog import CLAIMS
    from everydepth_papers.paper import paper as paper_of

    for paper in dict.fromkeys(claim.paper for claim in CLAIMS.values()):
        rows = RichTable(
            box=None,
            show_header=False,
            padding=(0, 1),
            title=Text(str(paper_of(paper)), "bold"),
            title_justify="left",
        )
        rows.add_column(no_wrap=True, min_width=max(map(len, CLAIMS)))
        for claim in CLAIMS.values():
            if claim.paper == paper:
                rows.add_row(Text(claim.name), Text(claim.statement))
        console.print(rows)


def _verdicts(found: Ledger) -> Table:
    """A line for everything that was measured; statements, premises and notes are in the report."""
    from everydepth.results import Table
    from everydepth_papers.number import number

    rows = found.table("measured").rows
    several = len({row[1] for row in rows}) > 1
    heads = ("claim", "on", "95% interval", "wanted", "verdict")
    counts = ", ".join(f"{n} {verdict}" for verdict, n in found.counts().items() if n)
    lines = [
        (
            claim,
            on,
            number(mean) if low is None else f"{number(low)} to {number(high)}",
            wanted,
            verdict,
        )
        for claim, on, mean, low, high, wanted, verdict, *_ in rows
    ]
    return Table(
        title=f"{found.about['subject']}: {counts}",
        headings=heads if several else (heads[0], *heads[2:]),
        rows=tuple(line if several else (line[0], *line[2:]) for line in lines),
    )
