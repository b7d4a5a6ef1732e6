"""`everydepth env`."""

from __future__ import annotations

from typing import Annotated

import typer


def env(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, for scripts and bug reports.")
    ] = False,
) -> None:
    """Show versions, devices, threads, memory and which extras are installed."""
    from rich.console import Console

    from everydepth.environment import Environment

    environment = Environment.current()
    if as_json:
        typer.echo(environment.to_json())
    else:
        Console().print(environment.table())
