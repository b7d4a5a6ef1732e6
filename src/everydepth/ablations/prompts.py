"""Classification as text completion: "... The topic is about <label>"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from everydepth.config import checked
from everydepth.data import Tokens
from everydepth.data.batches import pad_token
from everydepth.errors import DataError
from everydepth.stream import IGNORE_INDEX
from everydepth.stream.rows import whole_numbers
from everydepth.stream.text import padded

TEMPLATE = " The topic is about"


@checked
def label_prompts(
    texts: Sequence[str],
    labels: Tensor | Sequence[int],
    classes: Sequence[str],
    tokenizer: Callable[..., Mapping[str, Any]],
    max_length: int,
    *,
    loss_on: Literal["label", "all"] = "label",
) -> Tokens:
    """Each text followed by the template and the name of its label, padded on the left.

    If the result would exceed `max_length`, the text is truncated, never the prompt.
    loss_on: "label" gives targets to the label's tokens only, as `memorization` expects; "all" to
        every token, as for training a language model.
    """
    numbers = whole_numbers(labels, "labels").long()
    if len(numbers) != len(texts) or len(texts) == 0:
        raise DataError(
            f"{len(texts)} texts and {len(numbers)} labels; give one label per text, at least one"
        )
    if int(numbers.min()) < 0 or int(numbers.max()) >= len(classes):
        raise DataError(
            f"labels {int(numbers.min())} to {int(numbers.max())}, but there are {len(classes)} "
            "class names; give one per class, numbered from 0"
        )

    def encode(parts: Sequence[str]) -> list[list[int]]:
        return tokenizer(list(parts), add_special_tokens=False)["input_ids"]

    prompt = encode([TEMPLATE])[0]
    names = encode([f" {name}" for name in classes])
    if len({tuple(name) for name in names}) < len(names) or not all(names):
        raise DataError(
            "two class names have the same tokens (or none) and are indistinguishable; rename them"
        )
    room = max_length - len(prompt) - max(map(len, names))
    if room < 1:
        raise DataError(
            f"max_length {max_length} leaves no room for a text next to the prompt of "
            f"{max_length - room} tokens; increase it"
        )
    chosen = [names[number] for number in numbers.tolist()]
    starts = [[*text[:room], *prompt] for text in encode(texts)]
    rows = [start + name for start, name in zip(starts, chosen, strict=True)]
    width = max(map(len, rows))
    return Tokens(
        padded(rows, pad_token(tokenizer), left=True),
        padded([[1] * len(row) for row in rows], 0, left=True),
        labels=padded(rows if loss_on == "all" else chosen, IGNORE_INDEX, width, left=True),
    )
