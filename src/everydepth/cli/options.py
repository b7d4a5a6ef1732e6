"""Options that several commands share, each described once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from everydepth.config import Config, setting

Model = Annotated[
    str, typer.Argument(help="A model's folder, a run directory, or a Hugging Face name.")
]
Data = Annotated[str, typer.Option(help="Data by name (digits, cifar10, ...), a file or a folder.")]
Split = Annotated[str, typer.Option(help="Which part of the data.")]
DataRoot = Annotated[str | None, typer.Option(help="The folder that holds named data sets.")]
MaxSamples = Annotated[int | None, typer.Option(min=1, help="Stop after so many rows.")]
BatchSize = Annotated[int, typer.Option(min=1)]
MaxLength = Annotated[int, typer.Option(min=1, help="Tokens of a text at most.")]
Device = Annotated[str | None, typer.Option(help="For example cuda:0; by default cpu.")]
NewRun = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="A new run directory; by default nothing is written."),
]


@dataclass(frozen=True, kw_only=True)
class Source(Config):
    """Which data, and how much of it."""

    title: ClassVar[str] = "Data"

    data: str = setting(
        flags=("--data", "-d"), help="By name (digits, fashion-mnist, ...), a file or a folder."
    )
    data_root: str | None = setting(None, help="The folder that holds named data sets.")
    max_samples: int | None = setting(None, least=1, help="Use only the first N rows.")
    max_length: int = setting(128, least=1, help="Tokens of a text at most.")
