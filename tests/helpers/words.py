"""A tokenizer of a few words, with what ours needs of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tests.zoo import VOCABULARY


class Words:
    """Token i says `w<i>`, with a space in front."""

    pad_token_id = 0

    def encode(self, text: str, /) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def decode(self, ids: Any, /, skip_special_tokens: bool = False) -> str:
        return "".join(f" w{i}" for i in ids)

    def text(self, ids: Iterable[int]) -> str:
        return self.decode(list(ids)).strip()

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        assert all(token < VOCABULARY for row in rows for token in row)
        return [self.text(row) for row in rows]
