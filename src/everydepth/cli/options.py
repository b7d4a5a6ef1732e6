"""Options shared by several commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import typer

from everydepth.cli.loading import Columns, load_batches, load_data
from everydepth.config import Config, plain, setting
from everydepth.errors import SettingError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from everydepth.data import Batches

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


@dataclass(frozen=True, kw_only=True)
class Source(Config):
    """The data, and how much of it to use."""

    title: ClassVar[str] = "Data"

    data: str = setting(
        flags=("--data", "-d"), help="A name (digits, fashion-mnist, ...), a file or a folder."
    )
    data_root: str | None = setting(None, help="The folder with named datasets.")
    max_samples: int | None = setting(None, least=1, help="Use only the first N rows.")
    max_length: int = setting(128, least=1, help="Truncate texts to N tokens.")
    text: str | None = setting(None, help="The column of a table (CSV, JSON, ...) with the text.")
    pair: str | None = setting(None, help="The column with the second of two texts.")
    label: str | None = setting(None, help="The column with the class.")
    task: str | None = setting(
        None, help="embedding: measure the vectors of an encoder that has no head."
    )

    def asked(self) -> dict[str, Any]:
        """The settings that affect the outcome, as JSON values; the data's location does not."""
        optional = ("text", "pair", "label", "task")
        unset = [name for name in optional if getattr(self, name) is None]
        return {k: v for k, v in plain(self).items() if k not in ("data_root", *unset)}

    @property
    def one_file(self) -> bool:
        """Whether the data is a single file, which has no splits."""
        return Path(self.data).is_file()

    def check_part(self, option: str, split: str) -> None:
        """Raise an error if the held-out rows would be the training rows."""
        if self.one_file:
            raise SettingError(
                f"{option} {split}, but {self.data} is a single file, used entirely for training; "
                f"give a folder with one file per split ({split}{Path(self.data).suffix})"
            )

    @property
    def columns(self) -> Columns:
        return Columns(self.text, self.pair, self.label)

    def read(self, split: str) -> Any:
        """A split of the data, not yet prepared for a model."""
        return load_data(self.data, split, root=self.data_root, columns=self.columns)

    def stream(self, model: Any) -> Any:
        """The model, or its stream where the command line says what it predicts."""
        from everydepth.stream import as_stream

        return model if self.task is None else as_stream(model, task=cast(Any, self.task))

    def batches(self, name: str, model: PreTrainedModel, *, split: str, batch_size: int) -> Batches:
        """Batches of a split, as inputs of the model called `name`."""
        return load_batches(
            name,
            model,
            self.data,
            split=split,
            root=self.data_root,
            batch_size=batch_size,
            max_length=self.max_length,
            max_samples=self.max_samples,
            columns=self.columns,
            task=self.task,
        )


@dataclass(frozen=True, kw_only=True)
class Rows(Source):
    """One split of the data, in batches."""

    split: str = setting("test", help="The split of the data.")
    batch_size: int = setting(32, least=1, help="Rows per batch.")

    def load(self, name: str, model: PreTrainedModel) -> Batches:
        """Batches as inputs of the model called `name`."""
        return self.batches(name, model, split=self.split, batch_size=self.batch_size)
