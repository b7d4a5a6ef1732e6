"""Text as batches of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor

from everydepth.config import brief
from everydepth.errors import BatchError, SettingError

if TYPE_CHECKING:
    from everydepth.stream.contract import ResidualStream


def is_text(data: Any) -> TypeGuard[str | Sequence[str]]:
    """Whether data is a string or a list of strings."""
    if isinstance(data, str):
        return True
    if not isinstance(data, list | tuple) or not data:
        return False
    return all(isinstance(item, str) for item in cast(Sequence[Any], data))


def is_labeled_text(data: Any) -> TypeGuard[tuple[str | Sequence[str], Any]]:
    """Whether data is the tuple `(texts, labels)`."""
    if not isinstance(data, tuple) or len(cast(tuple[Any, ...], data)) != 2:
        return False
    return is_text(data[0]) and not is_text(data[1])


def in_tokens(data: Any, tokenizer: Any, max_length: int | None = None) -> Any:
    """Text, or `(texts, labels)`, as one batch of tokens; anything else unchanged."""
    if is_labeled_text(data):
        return {**encoded(data[0], tokenizer, max_length), "labels": data[1]}
    return encoded(data, tokenizer, max_length) if is_text(data) else data


def check_tokenizer(tokenizer: Any) -> None:
    """Raise if it cannot turn text into tokens and back."""
    both = (callable(getattr(tokenizer, name, None)) for name in ("encode", "decode"))
    if not all(both):
        raise SettingError(
            f"tokenizer={brief(tokenizer)}; pass the tokenizer itself, such as "
            "AutoTokenizer.from_pretrained(...)"
        )


def new_tokens_of(
    stream: ResidualStream, longest: int, wanted: int | None, name: str, default: int
) -> int:
    """How many tokens to generate after a prompt of `longest` tokens; raise if they do not fit.

    wanted: as requested; None for `default`, or as many as fit. name: the argument's, for the
    error.
    """
    fits = default if stream.positions is None else stream.positions - longest
    new = max(1, min(default, fits)) if wanted is None else wanted
    if stream.positions is None or new <= fits:
        return new
    step = (
        f"lower {name} to {fits}"
        if fits > 0
        else f"shorten the prompt to {stream.positions - 1} tokens or fewer"
    )
    raise BatchError(
        f"{longest} prompt tokens + {new} new ones = {longest + new}, "
        f"but {stream.name} has {stream.positions} positions; {step}"
    )


def encoded(
    texts: str | Sequence[str], tokenizer: Any, max_length: int | None = None
) -> dict[str, Tensor]:
    """One batch with a row per text, padded on the right, and its attention mask.

    >>> from everydepth.stream.text import encoded
    >>> encoded(["Once", "Once upon a time"], tokenizer)["attention_mask"].sum(1).tolist()
    [1, 4]
    """
    given: Any = [texts] if isinstance(texts, str) else texts
    rows: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(row, str) for row in rows):
        raise BatchError(f"the text is {brief(texts)}; pass a string or a list of strings")
    if tokenizer is None:
        raise SettingError(
            f"the data is text ({rows[0][:40]!r}), but there is no tokenizer; pass tokenizer=, or "
            "tokens instead of text"
        )
    check_tokenizer(tokenizer)
    # One text at a time, because not every tokenizer can pad.
    ids = [list(tokenizer.encode(text))[:max_length] for text in rows]
    empty = next((text for text, row in zip(rows, ids, strict=True) if not row), None)
    if empty is not None:
        raise SettingError(f"the text {empty!r} has no tokens; pass at least one word")
    pad = getattr(tokenizer, "pad_token_id", None) or 0
    mask = padded([[1] * len(row) for row in ids], 0)
    return {"input_ids": padded(ids, pad), "attention_mask": mask}


def padded(
    rows: Sequence[Sequence[int]], fill: int, width: int | None = None, *, left: bool = False
) -> Tensor:
    """Rows of numbers as one table, filled on one side up to `width`, by default the longest."""
    width = max(map(len, rows)) if width is None else width
    table = np.full((len(rows), width), fill, dtype=np.int64)
    for line, row in zip(table, rows, strict=True):
        start = width - len(row) if left else 0
        line[start : start + len(row)] = row
    return torch.from_numpy(table)
