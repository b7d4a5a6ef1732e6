"""`everydepth export`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from everydepth.cli.options import Split

# Files next to a model that are copied unchanged.
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


Weights = Literal["float32", "int8", "int4"]
Format = Literal["hf", "onnx", "gguf", "web"]


def export(
    model: Annotated[
        str,
        typer.Argument(
            help="A model's folder, a run directory, a Hugging Face name, or a GGUF file."
        ),
    ],
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="The directory to write; for a GGUF file, the file to write (has a default)."
        ),
    ] = None,
    depth: Annotated[int | None, typer.Option(help="Blocks to keep (default: all).")] = None,
    keep: Annotated[
        str | None, typer.Option(help="Blocks of a GGUF file to keep, such as 1-12,20-24.")
    ] = None,
    format: Annotated[  # noqa: A002 - the name of the option
        Format | None,
        typer.Option(
            help="A stock Hugging Face checkpoint, an ONNX graph, a GGUF file or a web page.",
            show_default="hf",
        ),
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="An exit policy, written by Policy.save.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A saved profile, for the model card.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Data, needed by --format onnx or web, --recalibrate and --weights."),
    ] = None,
    split: Split = "train",
    data_root: Annotated[str | None, typer.Option(help="The folder with named datasets.")] = None,
    max_samples: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N rows.")
    ] = None,
    recalibrate: Annotated[
        bool, typer.Option(help="Re-estimate batch norm statistics on the data.")
    ] = False,
    runtime: Annotated[
        Path | None,
        typer.Option(help="A folder with onnxruntime-web, for a web page (default: npm gets it)."),
    ] = None,
    weights: Annotated[
        Weights, typer.Option(help="How an ONNX graph or a GGUF file stores its weights.")
    ] = "float32",
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier export.")] = False,
) -> None:
    """Write a depth of a model as files that do not need everydepth.

    $ everydepth export runs/lpa small --depth 2
    $ everydepth export model.gguf small.gguf --depth 12
    """
    from everydepth.cli.source import Source
    from everydepth.engines.gguf_file import is_gguf
    from everydepth.errors import SettingError
    from everydepth.exits import Policy, Profile
    from everydepth.exits import export as write
    from everydepth.exits.export import refuse
    from everydepth.exits.load import load as load_model
    from everydepth.exits.load import load_tokenizer, model_folder

    if is_gguf(model):
        unused = {"--format": format, "--policy": policy, "--profile": profile, "--data": data}
        unused |= {"--recalibrate": recalibrate or None, "--runtime": runtime}
        unused["--weights"] = None if weights == "float32" else weights
        refuse("a GGUF file", unused)
        _cut(model, directory, depth, keep, overwrite)
        return
    refuse("a model; use --depth, which keeps the first blocks", {"--keep": keep})
    if directory is None:
        raise SettingError("no directory given; add a new one after the model")
    chosen = format or "hf"
    network = load_model(model)
    shown = chosen in ("onnx", "web")
    if data is None and (recalibrate or shown):
        wanted = "--recalibrate" if recalibrate else f"--format {chosen}"
        raise SettingError(f"{wanted} needs --data; give data by name, a file or a folder")
    rows: Any = None
    if data is not None:
        source = Source(data=data, data_root=data_root, max_samples=max_samples)
        rows = source.batches(model, network, split=split, batch_size=32)
    beside: Any = _Beside(Path(model_folder(model)))
    path = write(
        network,
        directory,
        depth=depth,
        format=chosen,
        exits=None if policy is None else Policy.load(policy),
        example=next(iter(rows)) if shown else None,
        tokenizer=load_tokenizer(model) if chosen == "gguf" else beside,
        profile=None if profile is None else Profile.load(profile),
        recalibrate=rows if recalibrate else None,
        runtime=runtime,
        weights=weights,
        data=None if weights == "float32" else rows,
        overwrite=overwrite,
    )
    size = sum(file.stat().st_size for file in path.rglob("*"))
    typer.echo(f"wrote {directory} ({size / 1e6:.1f} MB): see its README.md")


def _cut(
    model: str, target: Path | None, depth: int | None, keep: str | None, overwrite: bool
) -> None:
    from everydepth.engines.gguf_cut import cut_gguf

    path = target or Path(f"{Path(model).stem}-{f'depth{depth}' if depth else 'cut'}.gguf")
    cut = cut_gguf(model, path, depth=depth, keep=keep, overwrite=overwrite)
    typer.echo(
        f"wrote {path} ({cut.bytes / 1e6:.1f} MB): {len(cut.kept)} of {cut.of} blocks, checked in "
        "llama.cpp"
    )


class _Beside:
    """The tokenizer and processor files of a model folder, to copy unchanged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save_pretrained(self, save_directory: str) -> None:
        for name in _BESIDE:
            if (self.folder / name).is_file():
                shutil.copy(self.folder / name, save_directory)
