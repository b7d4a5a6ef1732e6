"""Tokens as text, while they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HALF = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer gives for the first bytes of a character whose rest is in the next token."""


class TextStream:
    """The text of tokens that come one after the other, up to a stop string.

    Only a window of tokens is decoded anew, so that a long text does not cost its square. What
    may turn out to be the beginning of a stop string is held back.
    """

    WINDOW = 16

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tokens: list[int] = []
        self._from = self._upto = 0  # of the window; what is before `_upto` is in `_held` or gone
        self._held = ""
        self.stopped = False

    def add(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """The new text that is certain; with `last` all that is left."""
        if self.stopped:
            return ""
        self._tokens.extend(tokens)
        before = self._decode(self._from, self._upto)
        whole = self._decode(self._from, len(self._tokens))
        if last or not whole.endswith(HALF):
            self._held += whole[len(before) :]
            self._upto = len(self._tokens)
            self._from = max(self._from, self._upto - self.WINDOW)
        return self._released(last)

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
    """How many characters at the end of a text begin the stop string."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
