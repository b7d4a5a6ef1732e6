"""A progress bar that is silent where nobody watches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")


def shown(items: Iterable[T], what: str, total: int, enabled: bool) -> Iterator[T]:
    """The items, with a bar on a terminal. `total` 0 is unknown."""
    console = Console(stderr=True)
    yield from track(
        items,
        description=what,
        total=total or None,
        console=console,
        disable=not (enabled and console.is_terminal),
    )
