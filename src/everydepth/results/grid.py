"""A grid of tokens as text: one row per depth, the deepest on top, above the tokens read."""

from __future__ import annotations

from collections.abc import Iterator
from shutil import get_terminal_size

from everydepth.results.result import Result

WIDEST = 12  # letters of a cell
SAME = "\N{MIDDLE DOT}"
WIDTH = 100  # where there is no terminal


def grid_lines(result: Result, width: int | None = None) -> Iterator[str]:
    """Lines of at most `width` letters, as many blocks of columns as that takes.

    A cell that says what the last depth says is left empty but for a mark, so that one sees where
    predictions become final.
    """
    width = get_terminal_size((WIDTH, 24)).columns if width is None else width
    yield result.title
    tokens = [_shown(token) for token in result.arrays["tokens"].tolist()]
    rows = [[_shown(cell) for cell in row] for row in result.arrays["text"].tolist()]
    depths = [str(depth) for depth in result.arrays["depth"].tolist()]
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
            yield _line(depths[place], cells, margin, [sizes[t] for t in columns])
        yield _line("read", [tokens[t] for t in columns], margin, [sizes[t] for t in columns])
        if stop < len(tokens):
            yield ""
        start = stop


def _line(name: str, cells: list[str], margin: int, sizes: list[int]) -> str:
    padded = [cell.ljust(size) for cell, size in zip(cells, sizes, strict=True)]
    return "  ".join([name.rjust(margin), *padded]).rstrip()


def _shown(token: str) -> str:
    """A token on one line; a space in front of it is seen."""
    text = token.replace(" ", "\N{OPEN BOX}").encode("unicode_escape").decode("ascii")
    plain = token.replace(" ", "\N{OPEN BOX}")
    text = plain if plain.isprintable() else text
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "\N{HORIZONTAL ELLIPSIS}"
