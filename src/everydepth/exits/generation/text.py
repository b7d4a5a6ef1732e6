"""Text from tokens as they are generated, with stop strings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from everydepth.errors import SettingError

OnText = Callable[[int, str], None]
"""Called with a row's number and a piece of its text."""

HALF = "\N{REPLACEMENT CHARACTER}"
"""How tokenizers decode an incomplete character, whose other bytes are in the next token."""


class TextStream:
    """The text of a stream of tokens, up to a stop string.

    Only a window of tokens is decoded each time, so that the cost of a long text is linear. Text
    that may be the beginning of a stop string is held back.

    before: tokens of the prompt, if the text is to follow it: some tokenizers omit the space before
        a first word.
    """

    WINDOW = 16
    BYTES = 4  # of a character, at most

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tokens = list(before[-self.WINDOW - self.BYTES + 1 :])
        # The window; the text before `_upto` is held back or has been returned.
        self._upto = len(self._tokens)
        self._from = self._start()
        self._before = self._decode(self._from, self._upto)
        self._held = ""
        self.stopped = False

    def add(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """The new text that is final; with `last`, all that remains."""
        if self.stopped:
            return ""
        self._tokens.extend(tokens)
        whole = self._decode(self._from, len(self._tokens))
        if last or not whole.endswith(HALF):
            self._held += whole[len(self._before) :]
            self._before, self._upto = whole, len(self._tokens)
            if self._upto - self._from > 2 * self.WINDOW:
                self._from = self._start()
                self._before = self._decode(self._from, self._upto)
        return self._released(last)

    def _start(self) -> int:
        """The start of a new window, outside a character whose bytes are tokens, if possible.

        Some tokenizers decode a run of bytes that is not UTF-8 as nothing but replacement
        characters, whatever whole characters are in it.
        """
        latest = max(0, self._upto - self.WINDOW)
        starts = range(latest, max(0, latest - self.BYTES + 1) - 1, -1)
        return next((at for at in starts if HALF not in self._decode(at, self._upto)), latest)

    def _decode(self, first: int, end: int) -> str:
        return str(self._tokenizer.decode(self._tokens[first:end], skip_special_tokens=True))

    def _released(self, last: bool) -> str:
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)]
        kept = 0 if last else max((_overlap(self._held, stop) for stop in self._stops), default=0)
        out = self._held[: len(self._held) - kept]
        self._held = self._held[len(out) :]
        return out


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of a text that begins the stop string."""
    most = min(len(stop) - 1, len(text))
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)


class Written:
    """The text of every row so far, up to a stop string; calls `on_text` with new pieces."""

    def __init__(self, tokenizer: Any, rows: int, stops: Sequence[str], on_text: OnText | None):
        self._rows = [TextStream(tokenizer, stops) for _ in range(rows)]
        self._texts = [""] * rows
        self._on_text = on_text

    def add(self, row: int, token: int) -> bool:
        """Add one token; True if the row's text has ended."""
        self._show(row, self._rows[row].add([token]))
        return self._rows[row].stopped

    def end(self) -> tuple[str, ...]:
        """Finish all rows; returns the texts."""
        for row, text in enumerate(self._rows):
            self._show(row, text.add([], last=True))
        return tuple(self._texts)

    def _show(self, row: int, piece: str) -> None:
        self._texts[row] += piece
        if piece and self._on_text is not None:
            self._on_text(row, piece)


def stream_text(
    model: Any, prompt: str | Sequence[str], *, tokenizer: Any = None, **settings: Any
) -> Iterator[str]:
    """Yield the continuation of a prompt piece by piece, as `generate` produces it.

    Leaving the loop early stops the model.

    settings: passed to `generate`.

    >>> from everydepth.exits.generation import stream_text
    >>> pieces = list(stream_text(llama, "Once", tokenizer=tokenizer, max_new_tokens=8))
    >>> said = ed.generate(llama, "Once", tokenizer=tokenizer, max_new_tokens=8)
    >>> "".join(pieces) == said.text
    True
    """
    from everydepth.exits.generation.generate import generate

    if not isinstance(prompt, str):
        raise SettingError(
            f"the prompt is a {type(prompt).__name__}; pass one string, or use generate(..., "
            "on_text=) for several"
        )
    pieces: SimpleQueue[str | BaseException | None] = SimpleQueue()
    left = Event()
    told: Callable[[int, list[int]], None] | None = settings.pop("on_tokens", None)

    def on_tokens(row: int, tokens: list[int]) -> None:
        if left.is_set():
            raise _Left
        if told is not None:
            told(row, tokens)

    def write() -> None:
        try:
            generate(
                model,
                prompt,
                tokenizer=tokenizer,
                on_text=lambda _, piece: pieces.put(piece),
                on_tokens=on_tokens,
                **settings,
            )
        except BaseException as problem:  # noqa: BLE001 - raised again where it is read
            pieces.put(problem)
        pieces.put(None)

    writing = Thread(target=write, daemon=True)
    writing.start()
    try:
        while (piece := pieces.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece
    finally:
        left.set()
        if not sys.is_finalizing():  # then no thread runs any more
            writing.join()  # it restores the model's mode


class _Left(Exception):
    """Raised in the writing thread when no one reads any more."""
