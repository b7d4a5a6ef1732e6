"""`everydepth serve`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from everydepth.cli.options import Device, Model
from everydepth.errors import SettingError
from everydepth.serving.config import ServeConfig

T = TypeVar("T")


def serve(
    model: Model,
    config: ServeConfig,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model; by default its folder's name.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Who may connect; 0.0.0.0 lets other machines in: set a key then.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 8000,
    profile: Annotated[
        Path | None,
        typer.Option(help="A saved profile: what each depth is worth, for /v1/models and --floor."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="An exit policy clients may name: risk-0.01=policy.json; repeatable."),
    ] = None,
    simulate: Annotated[
        Path | None,
        typer.Option(
            help="Start nothing: say what the load in this JSON file would see. Needs --profile."
        ),
    ] = None,
    device: Device = None,
) -> None:
    """Serve a model at every depth, behind OpenAI's interface: the request says how deep, or the
    load decides.

    everydepth serve MODEL

    curl localhost:8000/v1/completions -H 'content-type: application/json'
    -d '{"model": "MODEL@4", "prompt": "Once upon a time", "max_tokens": 32}'

    A language model answers /v1/completions and /v1/chat/completions (with "stream": true as it
    grows), a classifier /v1/classify. "model": "name@4" or "depth": 4 chooses a depth,
    "draft_depth": 2 the same text sooner, "policy" early exits. Every answer says its depth.
    /v1/models lists the depths, /metrics is for Prometheus; /health and /ready need no key.

    EVERYDEPTH_API_KEY in the environment sets the key that clients must send.
    """
    from rich.console import Console

    from everydepth.cli.showing import show
    from everydepth.exits.load import load as load_model
    from everydepth.exits.load import load_tokenizer, model_folder
    from everydepth.exits.policies import Policy
    from everydepth.exits.profile import Profile
    from everydepth.serving.serve import (
        Served,
        application,
        bound,
        check_installed,
        run,
        simulated,
    )
    from everydepth.stream import as_stream

    check_installed()
    found = None if profile is None else Profile.load(profile)
    network = load_model(model).to(device or "cpu")  # pyright: ignore[reportArgumentType]
    if simulate is not None:
        show(simulated(as_stream(network), simulate, found, config), Console())
        return
    folder = Path(model_folder(model))
    reads = "input_ids" in as_stream(network).inputs
    served = Served(
        name=name or Path(model).resolve().name,
        model=network,
        tokenizer=load_tokenizer(model) if reads else None,
        folder=folder,
        policies=dict(_named(text, Policy.load) for text in policy or ()),
        profile=found,
    )
    app = application(served, config, key=os.environ.get("EVERYDEPTH_API_KEY") or None)
    sock = bound(host, port)
    typer.echo(f"{served.name} at http://{host}:{sock.getsockname()[1]}/v1 (Ctrl-C ends it)")
    run(app, sock)


def _named(text: str, load: Callable[[Path], T]) -> tuple[str, T]:
    """risk-0.01=policy.json as its name and what the file holds."""
    name, _, file = text.partition("=")
    if not name or not file:
        raise SettingError(f"--policy {text}; write NAME=FILE, like risk-0.01=policy.json")
    return name, load(Path(file))
