"""Collect the generated tokens, and track which rows are done."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from everydepth.exits.generation.text import Written

OnTokens = Callable[[int, list[int]], None]
"""Called with a row's number and its new tokens."""


class Output:
    """Collects tokens; a row is done at a stop token or string, or when it has `limit` tokens."""

    def __init__(
        self,
        rows: int,
        limit: int,
        stops: Collection[int],
        on_tokens: OnTokens | None,
        written: Written | None = None,
    ) -> None:
        self._written = written
        self._limit, self._stops, self._on_tokens = limit, frozenset(stops), on_tokens
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.drafted: list[list[bool]] = [[] for _ in range(rows)]
        """Whether each token was an accepted draft."""
        self.active = list(range(rows))
        """The rows that are not done, by their original numbers."""

    @property
    def remaining(self) -> int:
        """The number of tokens that the slowest row still needs."""
        return self._limit - min(len(self.tokens[row]) for row in self.active)

    def nearer(self, new: list[int]) -> int:
        """How much `remaining` decreases if the active rows get these numbers of tokens."""
        said = [len(self.tokens[row]) for row in self.active]
        return min(a + b for a, b in zip(said, new, strict=True)) - min(said)

    def emit(self, new: list[list[int]], accepted: list[int] | None = None) -> list[int] | None:
        """Add tokens to the active rows; returns those that continue, or None if all do.

        accepted: how many of each row's first tokens were drafts.
        """
        going: list[int] = []
        for i, (row, tokens) in enumerate(zip(self.active, new, strict=True)):
            said = self.tokens[row]
            taken, ended = self._cut(row, tokens[: self._limit - len(said)])
            said.extend(taken)
            drafts = 0 if accepted is None else accepted[i]
            self.drafted[row].extend(place < drafts for place in range(len(taken)))
            if self._on_tokens is not None:
                self._on_tokens(row, taken)
            if len(said) < self._limit and not ended:
                going.append(i)
        if len(going) == len(self.active):
            return None
        self.active = [self.active[i] for i in going]
        return going

    def padded(self, pad: int, like: Tensor) -> Tensor:
        longest = max(len(tokens) for tokens in self.tokens)
        filled = [tokens + [pad] * (longest - len(tokens)) for tokens in self.tokens]
        return torch.tensor(filled, dtype=like.dtype, device=like.device)

    def _cut(self, row: int, tokens: list[int]) -> tuple[list[int], bool]:
        """The tokens up to and including one that ends the row, and whether there is one."""
        for i, token in enumerate(tokens):
            said = self._written is not None and self._written.add(row, token)
            if said or token in self._stops:
                return tokens[: i + 1], True
        return tokens, False
