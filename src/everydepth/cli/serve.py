"""`everydepth serve`."""

from __future__ import annotations

import os
import queue
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everydepth.cli.options import Device, Model
from everydepth.errors import RunError, SettingError
from everydepth.serving.config import ServeConfig

if TYPE_CHECKING:
    from everydepth.serving.recipe import Recipe


def serve(
    model: Model,
    config: ServeConfig,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model (default: its folder's name).")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Who may connect; 0.0.0.0 lets other machines in: set a key then.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8000,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="A saved profile: the quality of each depth, for /v1/models and --floor."
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="An exit policy clients may name: risk-0.01=policy.json; repeatable."),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(
            help="A policy of certify_depth: the governor never goes below its depth. Needs "
            "--target."
        ),
    ] = None,
    simulate: Annotated[
        Path | None,
        typer.Option(
            help="Start no server; predict how it would handle the load in this JSON file. Needs "
            "--profile."
        ),
    ] = None,
    device: Device = None,
) -> None:
    """Serve a model at every depth through OpenAI's API: each request, or the load, sets the depth.

    $ everydepth serve MODEL

    $ curl localhost:8000/v1/completions -H 'content-type: application/json' \\
      -d '{"model": "MODEL@4", "prompt": "Once upon a time", "max_tokens": 32}'

    A language model answers /v1/completions and /v1/chat/completions (streamed with "stream":
    true), a classifier /v1/classify. "model": "name@4" or "depth": 4 chooses a depth,
    "draft_depth": 2 drafts at one (0: from the text itself), and "policy" exits early. Every answer
    reports its depth. /v1/models lists the depths, /metrics is for Prometheus; /health and /ready
    need no key.

    Set EVERYDEPTH_API_KEY in the environment to require that key from clients.
    """
    from rich.console import Console

    from everydepth.cli.showing import show
    from everydepth.serving.recipe import Recipe
    from everydepth.serving.serve import bound, check_installed, run, simulated
    from everydepth.stream import as_stream

    check_installed()
    recipe = Recipe(
        model=str(model),
        name=name,
        profile=profile,
        policies=tuple(policy or ()),
        certificate=certificate,
        device=device,
        key=os.environ.get("EVERYDEPTH_API_KEY") or None,
        config=config,
    )
    if simulate is not None:
        stream = as_stream(recipe.network())
        show(simulated(stream, simulate, recipe.known(), config, recipe.promised()), Console())
        return
    if config.ray:
        _replicated(recipe, host, port)
        return
    if config.replicas != "1":
        raise SettingError(f"--replicas {config.replicas} needs --ray; without it there is one")
    app = recipe.app()
    sock = bound(host, port)
    typer.echo(f"{recipe.called} at http://{host}:{sock.getsockname()[1]}/v1 (Ctrl-C ends it)")
    run(app, sock)


def _replicated(recipe: Recipe, host: str, port: int) -> None:
    import signal

    from everydepth.serving.cluster import cluster, restart

    if port == 0:
        raise SettingError("--port 0 with --ray; give a port")
    told = queue.SimpleQueue[int]()
    exchange = getattr(signal, "SIGUSR1", None)  # Windows has none
    for number in filter(None, (signal.SIGINT, signal.SIGTERM, exchange)):
        signal.signal(number, lambda number, _: told.put(number))
    with cluster(recipe, recipe.config.replicas, host=host, port=port):
        typer.echo(
            f"{recipe.called} at http://{host}:{port}/v1, Ray Serve (Ctrl-C ends it; kill -USR1 "
            f"{os.getpid()} replaces the replicas)"
        )
        while told.get() == exchange:
            try:
                restart(recipe, recipe.config.replicas)
            except RunError as error:
                typer.echo(f"error: {error}", err=True)
            else:
                typer.echo("every replica was replaced")
