"""Transient progress bars on stderr, shown on terminals only; and a way to silence others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

T = TypeVar("T")

_running: list[Progress] = []


def shown(
    items: Iterable[T], title: str, *, total: int | None = None, enabled: bool = True
) -> Iterator[T]:
    """Iterate over items with a bar on a terminal. total: None if unknown."""
    with _bar(enabled, counts=True) as bar:
        yield from items if bar is None else bar.track(items, total=total, description=title)


@contextmanager
def timed(
    title: str, total: float, *, enabled: bool = True
) -> Generator[Callable[[float], None], None, None]:
    """A bar for work that is being timed: drawn only when the function it gives is called, with
    the amount done, since drawing in between would take time from the work."""
    with _bar(enabled, counts=False) as bar:
        if bar is None:
            yield lambda _: None
            return
        task = bar.add_task(title, total=total)
        bar.refresh()

        def advance(amount: float) -> None:
            bar.advance(task, amount)
            bar.refresh()

        yield advance


def say(text: str) -> None:
    """Print a line on stderr, above a running bar; on terminals only."""
    console = _running[-1].console if _running else Console(stderr=True)
    if console.is_terminal:
        console.print(text, highlight=False, markup=False)


def put_away() -> None:
    """Remove all bars, before an error that interrupted their work is shown."""
    while _running:
        _running.pop().stop()


@contextmanager
def _bar(enabled: bool, *, counts: bool) -> Generator[Progress | None, None, None]:
    """counts: it shows how many items are done, and redraws itself."""
    console = Console(stderr=True)
    if not (enabled and console.is_terminal):
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        *([MofNCompleteColumn()] if counts else []),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, auto_refresh=counts) as bar:
        _running.append(bar)
        try:
            yield bar
        finally:
            if bar in _running:
                _running.remove(bar)


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
