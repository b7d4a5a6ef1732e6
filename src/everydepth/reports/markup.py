"""HTML and JSON from untrusted text, escaped so that it is displayed but never run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import zip_longest
from typing import Any


def text(value: object) -> str:
    """Text escaped for HTML, with invalid characters replaced."""
    return escape(str(value).encode("utf-8", "replace").decode(), quote=True)


def token(piece: object) -> str:
    """A token as escaped text, with symbols for whitespace."""
    shown = str(piece).replace("\n", "⏎").replace("\t", "⇥")
    return text(shown if shown.strip() else "␣" * len(shown) or "∅")


def script_json(content: Any) -> str:
    """JSON that cannot end the script element around it, nor open a comment or another script."""
    written = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return written.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], attributes: Sequence[str] = ()
) -> str:
    """An HTML table. attributes: markup for each row's tag."""
    head = "".join(f"<th>{text(cell)}</th>" for cell in headings)
    body = "".join(
        f"<tr{f' {more}' if more else ''}>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>"
        for row, more in zip_longest(rows, attributes)
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def token_table(
    tokens: Sequence[str], rows: Mapping[int, Sequence[str]], more: Callable[[int], str]
) -> str:
    """Tokens by depth, the deepest on top, as a table whose text can be selected.

    tokens: the cells of the head. rows: the cells of each depth. more: attributes of a depth's row.
    All of it is markup.
    """
    body = [
        f'<tr{more(depth)} data-depth="{depth}"><th>{depth}</th>{"".join(cells)}</tr>'
        for depth, cells in rows.items()
    ]
    return (
        f'<div class="scroll"><table class="tokens"><thead><tr><th>depth</th>{"".join(tokens)}'
        f"</tr></thead><tbody>{''.join(reversed(body))}</tbody></table></div>"
    )


def token_cell(word: object, chance: float, more: str = "") -> str:
    """A token on a background as dark as it is likely. more: attributes, as markup."""
    if not math.isfinite(chance):
        return f"<td{more}>{token(word)}</td>"
    strength = min(max(chance, 0.0), 1.0)
    ink = ";color:#fff" if strength > 0.6 else ""
    style = f"background:rgba(0,114,178,{strength:.2f}){ink}"
    return f'<td{more} style="{style}">{token(word)}</td>'


def folded(summary: str, content: str) -> str:
    """Content that expands on a click."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>"
