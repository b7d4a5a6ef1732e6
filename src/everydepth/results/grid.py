"""A grid of tokens as text: one row per depth, the deepest on top, above the input tokens."""

from __future__ import annotations

from collections.abc import Iterator
from shutil import get_terminal_size

from everydepth.results.result import Result

WIDEST = 12  # characters per cell
SAME = "\N{MIDDLE DOT}"
WIDTH = 100  # where there is no terminal


def grid_lines(result: Result, width: int | None = None) -> Iterator[str]:
    """Lines of at most `width` characters, in several blocks of columns if needed.

    A cell that agrees with the last depth contains only a mark, which shows where predictions
    become final.
    """
    width = get_terminal_size((WIDTH, 24)).columns if width is None else width
    yield result.title
    if result.is_gap:
        yield result.note or "not measured"
        return
    tokens = [_shown(token) for token in result.arrays["tokens"].tolist()]
    rows = [[_shown(cell) for cell in row] for row in result.arrays["text"].tolist()]
    depths = [str(depth) for depth in result.x().tolist()]
    margin = max(map(len, (*depths, "read")))
    sizes = [max(len(tokens[t]), *(len(row[t]) for row in rows)) for t in range(len(tokens))]
    start = 0
    while start < len(tokens):
        stop, used = start, margin
        while stop < len(tokens) and (stop == start or used + 2 + sizes[stop] <= width):
            used, stop = used + 2 + sizes[stop], stop + 1
        columns = range(start, stop)
        for place in reversed(range(len(rows))):
            final = place == len(rows) - 1
            cells = [
                rows[place][t] if final or rows[place][t] != rows[-1][t] else SAME for t in columns
            ]
            yield _line(depths[place], cells, margin, sizes[start:stop])
        yield _line("read", tokens[start:stop], margin, sizes[start:stop])
        if stop < len(tokens):
            yield ""
        start = stop


def _line(name: str, cells: list[str], margin: int, sizes: list[int]) -> str:
    padded = [cell.ljust(size) for cell, size in zip(cells, sizes, strict=True)]
    return "  ".join([name.rjust(margin), *padded]).rstrip()


def _shown(token: str) -> str:
    """A token on one line, with visible spaces."""
    text = token.replace(" ", "\N{OPEN BOX}")
    if not text.isprintable():
        text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "\N{HORIZONTAL ELLIPSIS}"
