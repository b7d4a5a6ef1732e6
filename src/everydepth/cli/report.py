"""`everydepth report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everydepth.environment import command_line
from everydepth.errors import SettingError
from everydepth.files import untaken


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Run directories or saved results; NAME=RUN sets the name shown.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The page to write.", dir_okay=False)
    ] = Path("report.html"),
    title: Annotated[str, typer.Option(help="The title of the page.")] = "What each depth gives",
) -> None:
    """Write one HTML page about one or more runs: a depth dial, charts, and their provenance.

    $ everydepth report runs/lpa -o page.html
    $ everydepth report E2E=runs/a LPA=runs/b -o page.html

    The page is one file and needs no network.
    """
    from everydepth.reports import report as write

    command = command_line()
    page = write(_named(runs), out, title=title, command=command)
    typer.echo(f"wrote {page} ({page.stat().st_size / 1e6:.1f} MB)")


def _named(runs: list[str]) -> dict[str, str]:
    """Paths by name: the part before `=`, or the folder's name, numbered if taken."""
    found: dict[str, str] = {}
    for run in runs:
        name, given, path = run.partition("=")
        # A folder's name may contain "=".
        if Path(run).exists() or not given:
            name, path = Path(run).resolve().name, run
        elif name in found:
            raise SettingError(f"{name!r} names two runs; give each its own name")
        found[untaken(name, found)] = path
    return found
