"""A transient progress bar on stderr, shown on terminals only; and a way to silence others."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


def shown(
    items: Iterable[T], title: str, *, total: int | None = None, enabled: bool = True
) -> Iterator[T]:
    """Iterate over items with a bar on a terminal. total: None if unknown."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not (enabled and console.is_terminal):
        yield from items
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield from bar.track(items, total=total, description=title)


@contextmanager
def quiet_transformers() -> Generator[None, None, None]:
    """Silence the progress bars and log messages of transformers inside the context."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
