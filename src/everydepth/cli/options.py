"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(help="A model's folder, a run directory, or a Hugging Face name.")
]
Split = Annotated[str, typer.Option(help="The split of the data.")]
Device = Annotated[str | None, typer.Option(help="For example cuda:0 (default: cpu).")]
NewRun = Annotated[
    Path | None,
    typer.Option("--run", "-o", help="A new run directory (default: nothing is written)."),
]
OwnRun = Annotated[
    Path | None,
    typer.Option(
        "--run", "-o", help="A new run directory (default: the model's own, or a new one in runs)."
    ),
]
