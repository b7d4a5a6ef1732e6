"""Text while it grows: pieces to show, strings that end it, and an iterator of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any

from everydepth.errors import SettingError

OnText = Callable[[int, str], None]
"""Called with a row's number and a piece of its text."""

HALF = "\N{REPLACEMENT CHARACTER}"  # half a character: the rest of its bytes is in the next token


class Written:
    """The text of every row so far, given out in pieces, up to the string that ends it."""

    def __init__(self, tokenizer: Any, rows: int, stops: Sequence[str], on_text: OnText | None):
        self._tokenizer, self._stops, self._on_text = tokenizer, tuple(stops), on_text
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._shown = [0] * rows
        self._longest = max(map(len, stops), default=0)

    def add(self, row: int, token: int) -> bool:
        """Take in one token; True if the row's text has ended."""
        self._tokens[row].append(token)
        text = self._decoded(row)
        ended = any(stop in text for stop in self._stops)
        if not ended:
            # What may be the beginning of a stop string waits for what follows.
            self._show(row, text[: len(text) - self._held(text)])
        return ended

    def end(self) -> tuple[str, ...]:
        """The texts, the rest of each given out."""
        texts = tuple(self._cut(self._decoded(row)) for row in range(len(self._tokens)))
        for row, text in enumerate(texts):
            self._show(row, text, last=True)
        return texts

    def _decoded(self, row: int) -> str:
        return str(self._tokenizer.decode(self._tokens[row], skip_special_tokens=True))

    def _cut(self, text: str) -> str:
        places = [text.find(stop) for stop in self._stops if stop in text]
        return text[: min(places)] if places else text

    def _held(self, text: str) -> int:
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0

    def _show(self, row: int, text: str, *, last: bool = False) -> None:
        if self._on_text is None or (text.endswith(HALF) and not last):
            return
        piece, self._shown[row] = text[self._shown[row] :], max(len(text), self._shown[row])
        if piece:
            self._on_text(row, piece)


def stream_text(
    model: Any, prompt: str | Sequence[str], *, tokenizer: Any, **settings: Any
) -> Iterator[str]:
    """The continuation of one prompt, piece by piece, while `generate` writes it.

    settings: those of `generate`.

    >>> from everydepth.exits.generation import stream_text
    >>> pieces = list(stream_text(llama, "Once", tokenizer=tokenizer, max_new_tokens=8))
    >>> said = ed.generate(llama, "Once", tokenizer=tokenizer, max_new_tokens=8)
    >>> "".join(pieces) == said.text
    True
    """
    from everydepth.exits.generation.generate import generate

    if not isinstance(prompt, str):
        raise SettingError(
            f"the prompt is {type(prompt).__name__}; pieces of several texts would mix: pass one "
            "string, or use generate(..., on_text=)"
        )
    pieces: SimpleQueue[str | BaseException | None] = SimpleQueue()

    def write() -> None:
        try:
            generate(
                model,
                prompt,
                tokenizer=tokenizer,
                on_text=lambda _, piece: pieces.put(piece),
                **settings,
            )
        except BaseException as problem:  # noqa: BLE001 - raised again where it is read
            pieces.put(problem)
        pieces.put(None)

    Thread(target=write, daemon=True).start()
    while (piece := pieces.get()) is not None:
        if isinstance(piece, BaseException):
            raise piece
        yield piece
