"""Options that several commands share, each described once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from everydepth.config import Config, setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from everydepth.data import Batches

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

    def batches(self, name: str, model: PreTrainedModel, *, split: str, batch_size: int) -> Batches:
        """As the model called `name` takes it."""
        from everydepth.cli.loading import load_batches

        return load_batches(
            name,
            model,
            self.data,
            split=split,
            root=self.data_root,
            batch_size=batch_size,
            max_length=self.max_length,
            max_samples=self.max_samples,
        )
