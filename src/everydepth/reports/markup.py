"""Text from data on its way into a page: shown, never run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from itertools import zip_longest
from typing import Any


def text(value: object) -> str:
    """Escaped for HTML; what is no character at all is shown as a replacement sign."""
    return escape(str(value).encode("utf-8", "replace").decode(), quote=True)


def token(piece: object) -> str:
    """A token as text; blanks and line ends, which cannot be seen, as signs."""
    shown = str(piece).replace("\n", "⏎").replace("\t", "⇥")
    return text(shown if shown.strip() else "␣" * len(shown) or "∅")


def script_json(content: Any) -> str:
    """JSON that cannot end the script element around it, nor open a comment or another script."""
    written = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return written.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], attributes: Sequence[str] = ()
) -> str:
    """Rows of cells below a row of headings. attributes: markup of each row."""
    head = "".join(f"<th>{text(cell)}</th>" for cell in headings)
    body = "".join(
        f"<tr{f' {more}' if more else ''}>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>"
        for row, more in zip_longest(rows, attributes)
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def folded(summary: str, content: str) -> str:
    """Markup that opens on a click."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>"
