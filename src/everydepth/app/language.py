"""The Language tab: each depth's next token, and texts written at several depths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from everydepth.app.shelf import Item
from everydepth.errors import SettingError
from everydepth.exits.generation import generate
from everydepth.exits.generation.text import TextStream
from everydepth.reports.markup import text, token, token_cell, token_table
from everydepth.results.result import Result
from everydepth.tracing import token_grid

TOP = 5
LONGEST_PROMPT = 2000  # characters
LONGEST_GRID = 96  # columns
ENOUGH = 1.0  # seconds beyond which timing is not repeated


@dataclass(frozen=True, kw_only=True)
class Writing:
    """One continuation: its tokens as text, which ones were drafted, and its speed."""

    title: str
    pieces: tuple[str, ...]
    drafted: tuple[bool, ...]
    tokens_per_second: float
    note: str = ""


def grid(item: Item, prompt: str, new_tokens: int) -> Result:
    """Each depth's top five tokens at every position of the prompt and its continuation."""
    ids = _checked(item, prompt)
    room = _room(item, len(ids))
    return token_grid(
        item.stream, item.tokenizer, prompt, new_tokens=min(new_tokens, room), top=TOP
    )


def grid_table(found: Result, depth: int | None = None) -> str:
    """The grid as HTML, last depth on top; color shows probability, a frame where it settles.

    depth: the row to highlight.
    """
    tokens = found.arrays["tokens"]
    best, best_chance = found.arrays["top_text"], found.arrays["top_probability"]
    settled, start = found.arrays["saturated_at"], int(found.meta["prompt_tokens"])
    shown = range(max(0, len(tokens) - LONGEST_GRID), len(tokens))
    head = [f'<th class="{"" if i < start else "ed-new"}">{token(tokens[i])}</th>' for i in shown]
    rows = {
        level: [_cell(words[i], chances[i], settled=bool(settled[i] == level)) for i in shown]
        for level, (words, chances) in enumerate(zip(best, best_chance, strict=True))
    }
    drawn = token_table(head, rows, lambda level: ' class="ed-at"' if level == depth else "")
    return f'{drawn}<div class="ed-tip" hidden></div>'


def grid_words(found: Result) -> str:
    """A summary of the grid."""
    settled, last = found.arrays["saturated_at"], len(found.arrays["depth"]) - 1
    half = int((settled <= last // 2).sum())
    return (
        f'<p class="ed-words">{len(settled)} positions: the median next token is settled at depth '
        f"{np.median(settled):.0f} of {last}, and {half} are settled by half the depth. Each cell "
        "is the token its depth finds most likely next: darker is more certain, and a frame marks "
        "the depth from which it no longer changes. Hover over a cell for its top five.</p>"
    )


def write(item: Item, prompt: str, depth: int, count: int) -> list[Writing]:
    """The continuation at a depth, at full depth, and at full depth with drafts at that depth.

    The three alternate after a warm-up, and the fastest run of each counts.
    """
    ids, last = _checked(item, prompt), item.stream.depth
    count = min(count, _room(item, len(ids)))
    ways: dict[str, dict[str, Any]] = {f"Depth {depth} of {last}": {"depth": depth}}
    if depth < last:
        ways["Full depth"] = {}
        ways[f"Full depth, drafted at {depth}"] = {"draft_depth": depth, "draft_always": True}
    for options in ways.values():
        generate(item.stream, [ids], max_new_tokens=min(4, count), **options)
    found: dict[str, Any] = {}
    for _ in range(2):
        for title, options in ways.items():
            said = generate(item.stream, [ids], max_new_tokens=count, **options)
            before = found.get(title)
            if before is None or said.stats.seconds < before.stats.seconds:
                found[title] = said
        if sum(said.stats.seconds for said in found.values()) > ENOUGH:
            break
    full = found.get("Full depth")
    return [_writing(item, ids, title, said, full) for title, said in found.items()]


def writings(found: Sequence[Writing]) -> str:
    """Texts side by side, with accepted drafts highlighted."""
    cards = "".join(
        f'<div class="ed-card"><h3>{text(one.title)}</h3>'
        f'<p class="ed-speed"><strong>{one.tokens_per_second:,.0f}</strong> tokens/s'
        f'<small>{text(one.note)}</small></p><p class="ed-text">{_marked(one)}</p></div>'
        for one in found
    )
    return f'<div class="ed-cards">{cards}</div>'


def _writing(item: Item, ids: list[int], title: str, said: Any, full: Any) -> Writing:
    stats, tokens = said.stats, said.tokens[0]
    drafted = stats.from_draft[0] if stats.from_draft else (False,) * len(tokens)
    note = ""
    if stats.from_draft and full is not None:
        same = "the same text" if tokens == full.tokens[0] else "another text"
        times = stats.tokens_per_second / full.stats.tokens_per_second
        note = f"{same}, {times:.2f} times the speed; {sum(drafted)} of {len(tokens)} drafted"
    elif full is not None and said is not full:
        agree = sum(a == b for a, b in zip(tokens, full.tokens[0], strict=False))
        note = f"{agree} of {len(full.tokens[0])} tokens match full depth"
    return Writing(
        title=title,
        pieces=_pieces(item.tokenizer, ids, tokens),
        drafted=drafted,
        tokens_per_second=stats.tokens_per_second,
        note=note,
    )


def _pieces(tokenizer: Any, prompt: list[int], tokens: list[int]) -> tuple[str, ...]:
    """The text that each token adds; a partial character waits for the token that completes it."""
    growing, last = TextStream(tokenizer, before=prompt), len(tokens) - 1
    return tuple(growing.add([one], last=place == last) for place, one in enumerate(tokens))


def _marked(one: Writing) -> str:
    return "".join(
        f"<mark>{text(piece)}</mark>" if drafted else text(piece)
        for piece, drafted in zip(one.pieces, one.drafted, strict=True)
        if piece
    )


def _checked(item: Item, prompt: str) -> list[int]:
    if len(prompt) > LONGEST_PROMPT:
        raise SettingError(
            f"the prompt has {len(prompt):,} characters, but {LONGEST_PROMPT:,} is the limit here; "
            "shorten it"
        )
    ids = item.tokenizer.encode(prompt)
    if not ids:
        raise SettingError("the prompt is empty; type at least one word")
    limit = item.stream.positions
    if limit is not None and len(ids) >= limit:
        raise SettingError(
            f"the prompt has {len(ids)} tokens, but {item.stream.name} allows {limit}; shorten it"
        )
    return ids


def _room(item: Item, used: int) -> int:
    limit = item.stream.positions
    return 10**6 if limit is None else limit - used


def _cell(words: np.ndarray, chances: np.ndarray, *, settled: bool) -> str:
    tip = "\n".join(f"{token(w)}\t{c:.1%}" for w, c in zip(words, chances, strict=True))
    mark = ' class="ed-settled"' if settled else ""
    return token_cell(words[0], float(chances[0]), f'{mark} data-tip="{tip}"')
