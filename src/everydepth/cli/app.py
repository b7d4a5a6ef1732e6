"""`everydepth app`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from everydepth.app.shelf import Item


def app(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN or MODEL]...",
            help="Run directories, folders of models, or Hugging Face names. Without any, the "
            "models of `make demo`, and small ones that are made in seconds.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Data that classifiers are tried on: a name (digits, ...) or a folder."),
    ] = None,
    folder: Annotated[
        Path, typer.Option(help="Where the content of the playground is kept.", file_okay=False)
    ] = Path("runs/demo"),
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="By default the first free one from 7860 up."),
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="Who may connect; 0.0.0.0 lets other machines in, without a password."),
    ] = "127.0.0.1",
    server: Annotated[
        str | None,
        typer.Option(
            help="The address of `everydepth serve`, like http://127.0.0.1:8000: a tab shows it "
            "live."
        ),
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Look into networks in a browser: pictures, text and surfaces at every depth.

    Vision: watch a picture rise through a classifier, see where it settles and where it may leave.
    Language: what each layer would say next; texts of two depths side by side, with their speed.
    Surfaces: what k blocks have learned of a function. Compare: two runs, all their curves.
    Server: what a running `everydepth serve` is doing.

    It runs on this machine only and needs no network.

    everydepth app · everydepth app runs/mine --data digits · everydepth app ~/models/stories
    """
    from everydepth.app import serve

    found = [_item(source) for source in sources or ()]
    serve(
        found,
        folder=folder,
        data=data,
        host=host,
        port=port,
        browser=browser,
        live=server,
        say=typer.echo,
    )


def _item(source: str) -> str | Item:
    """A folder as it is; a name of the hub as what is loaded under it."""
    if Path(source).exists() or source.count("/") > 1 or source.startswith((".", "/", "~")):
        return str(Path(source).expanduser())
    from everydepth.app.shelf import Item
    from everydepth.cli.loading import preprocessing_of
    from everydepth.exits.load import load as load_model
    from everydepth.exits.load import load_tokenizer
    from everydepth.stream import as_stream

    model = load_model(source)
    speaks = as_stream(model).task == "causal_lm"
    return Item(
        source,
        Path(source),
        given=model,
        given_tokenizer=load_tokenizer(source) if speaks else None,
        preprocessing=preprocessing_of(source),
    )
