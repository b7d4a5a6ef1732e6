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
            help="Run directories, model folders or Hugging Face names. By default the models of "
            "`make demo`, and small ones trained in seconds.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Data to try classifiers on: a name (digits, ...) or a folder."),
    ] = None,
    folder: Annotated[
        Path, typer.Option(help="Where the playground keeps its models.", file_okay=False)
    ] = Path("runs/demo"),
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Default: the first free one from 7860 up."),
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="Who may connect; 0.0.0.0 lets other machines in, without a password."),
    ] = "127.0.0.1",
    server: Annotated[
        str | None,
        typer.Option(
            help="The address of a running `everydepth serve` to watch in a tab, such as "
            "http://127.0.0.1:8000."
        ),
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
) -> None:
    """Explore networks in a browser: pictures, text and surfaces at every depth.

    $ everydepth app
    $ everydepth app runs/mine --data digits
    $ everydepth app ~/models/stories

    Vision: follow an image through a classifier, and see where the answer settles and where it
    could exit. Language: what each layer would say next, and texts from several depths with their
    speed. Surfaces: what the first k blocks have learned of a function. Results: every measurement
    of a run. Compare: two runs side by side. Server: what a running `everydepth serve` is doing.

    The page is served to this machine only and needs no network.
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
    """A folder unchanged, or the model of a Hugging Face name."""
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
