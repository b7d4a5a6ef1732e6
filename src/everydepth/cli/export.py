"""`everydepth export`."""

from __future__ import annotations

import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from everydepth.cli.options import Model, Split

# What a model folder may hold beside the model: it goes along unchanged.
_BESIDE = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


class Format(StrEnum):
    """What can be written."""

    HF = "hf"
    ONNX = "onnx"


def export(
    model: Model,
    directory: Annotated[Path, typer.Argument(help="The directory to write.")],
    depth: Annotated[int | None, typer.Option(help="Blocks to keep; by default all.")] = None,
    format: Annotated[  # noqa: A002 - the name of the option
        Format, typer.Option(help="A stock Hugging Face checkpoint, or an ONNX graph.")
    ] = Format.HF,
    policy: Annotated[
        Path | None, typer.Option(help="An exit policy, as Policy.save writes it.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A saved profile, for the model card.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Data for an example batch, which ONNX needs, or for --recalibrate."),
    ] = None,
    split: Split = "train",
    data_root: Annotated[
        str | None, typer.Option(help="The folder that holds named data sets.")
    ] = None,
    max_samples: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N rows.")
    ] = None,
    recalibrate: Annotated[
        bool, typer.Option(help="Estimate batch norm statistics anew on the data.")
    ] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier export.")] = False,
) -> None:
    """Write a depth of a model as files that need nothing of everydepth.

    everydepth export runs/lpa small --depth 2
    """
    from everydepth.cli.loading import load_batches
    from everydepth.errors import SettingError
    from everydepth.exits import Policy, Profile
    from everydepth.exits import export as write
    from everydepth.exits.load import load as load_model
    from everydepth.exits.load import model_folder

    network = load_model(model)
    if data is None and (recalibrate or format is Format.ONNX):
        wanted = "--recalibrate" if recalibrate else "--format onnx"
        raise SettingError(f"{wanted} needs --data; give data by name, a file or a folder")
    rows: Any = None
    if data is not None:
        rows = load_batches(
            model, network, data, split=split, root=data_root, max_samples=max_samples
        )
    path = write(
        network,
        directory,
        depth=depth,
        format=format.value,
        exits=None if policy is None else Policy.load(policy),
        example=next(iter(rows)) if format is Format.ONNX else None,
        tokenizer=_Beside(Path(model_folder(model))),
        profile=None if profile is None else Profile.load(profile),
        recalibrate=rows if recalibrate else None,
        overwrite=overwrite,
    )
    size = sum(file.stat().st_size for file in path.iterdir())
    typer.echo(f"wrote {directory} ({size / 1e6:.1f} MB): see its README.md")


class _Beside:
    """The tokenizer and processor files of a model folder, copied as they are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save_pretrained(self, save_directory: str) -> None:
        for name in _BESIDE:
            if (self.folder / name).is_file():
                shutil.copy(self.folder / name, save_directory)
