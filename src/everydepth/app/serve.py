"""`serve`: start the playground."""

from __future__ import annotations

import threading
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path

from everydepth.app.content import DEMO, prepare
from everydepth.app.server import HOST, bind, in_a_loop, own_cache, server
from everydepth.app.shelf import Item, item_at, shelf_of
from everydepth.environment import require


def serve(
    sources: Sequence[str | Path | Item] = (),
    *,
    folder: str | Path = DEMO,
    data: str | None = None,
    host: str = HOST,
    port: int | None = None,
    browser: bool = True,
    live: str | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Run the playground until it is stopped (Ctrl-C).

    sources: run directories and model folders; by default those in `folder`, which are trained if
        they are missing.
    data: the name of a dataset to try classifiers on.
    live: the address of a server whose current Results are shown.
    """
    require("the playground", "gradio", extra="app")
    given = [s if isinstance(s, Item) else item_at(Path(s)) for s in sources]
    tab = given[0].tab if given and given[0].has_model else None
    found = bind(host, port)  # before any work, so that a port in use fails at once
    with found, own_cache():
        if not given:
            prepare(Path(folder), say=say)
        shelf = shelf_of(Path(folder), *given)

        from everydepth.app.build import build

        first = "compare" if given and tab in (None, "other") else tab
        first = "server" if live is not None else first
        blocks = in_a_loop(
            lambda: build(shelf, folder=Path(folder), data=data, first=first, server=live)
        )
        for name, why in shelf.problems.items():
            say(f"left out {name}: {why}")
        place = f"http://{'localhost' if host == '127.0.0.1' else host}:{found.getsockname()[1]}"
        say(f"the playground is at {place} (Ctrl-C stops it)")
        if browser:
            threading.Timer(1.0, webbrowser.open, [place]).start()
        server(blocks, shelf, found).run(sockets=[found])
