"""Drafts without a model: what followed when the text's last few tokens stood there before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch

from everydepth.exits.generation.sampling import Draft

GRAM = 3  # tokens by which an earlier place is found; longer matches are measured there
LONGEST = 32  # tokens of a match that count
CERTAINTY = 0.25  # how much of the remaining doubt each further token of a match removes


class Text:
    """The tokens of one row, and where each short run of them was last followed by something."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            here = len(self.tokens)
            for n in range(1, min(GRAM, here) + 1):
                self._after[tuple(self.tokens[-n:])] = here
            self.tokens.append(token)

    def match(self) -> tuple[int, int]:
        """The place after an earlier occurrence of the text's end, and how many tokens agree.

        (0, 0) if its last token is new.
        """
        for n in range(min(GRAM, len(self.tokens)), 0, -1):
            place = self._after.get(tuple(self.tokens[-n:]))
            if place is not None:
                while n < min(place, LONGEST) and self.tokens[place - n - 1] == self.tokens[-n - 1]:
                    n += 1
                return place, n
        return 0, 0

    def following(self, place: int, count: int) -> list[int]:
        """`count` tokens from this place on; beyond the end of the text they repeat themselves."""
        period = len(self.tokens) - place
        found = self.tokens[place : place + count]
        return [found[i % period] for i in range(count)]


class Lookup:
    """Drafts for a batch of texts, each from its own tokens; no block runs for them.

    The longer the match, the likelier its continuation. A row without a match repeats its last
    token, with a confidence of 0.
    """

    def __init__(self, texts: Sequence[Text], longest: int) -> None:
        """texts: one for each row. longest: the most drafts."""
        self._texts, self._longest = texts, longest
        self._places, self.agree = zip(*(text.match() for text in texts), strict=True)
        """Where each row's end was found earlier in it, and how many tokens of it."""

    @cached_property
    def _tokens(self) -> list[list[int]]:
        return [
            # Where nothing was found: the last token, again and again.
            text.following(place if agree else len(text.tokens) - 1, self._longest)
            for text, place, agree in zip(self._texts, self._places, self.agree, strict=True)
        ]

    def confidence(self, place: int) -> list[float]:
        """Of the draft at this place, in each row."""
        return [1 - (1 - CERTAINTY) ** (n + place) if n else 0.0 for n in self.agree]

    def draft(self, place: int, device: torch.device) -> Draft:
        """The draft at this place, from 0 on."""
        tokens = torch.tensor([row[place] for row in self._tokens], device=device)
        return Draft(tokens, torch.tensor(self.confidence(place), device=device))
