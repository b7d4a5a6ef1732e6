"""Synthetic tales that a small model learns in seconds, without a download.

A grammar generates them. Who, where and what are named once and needed again several sentences
later: shallow depths learn the grammar, deeper ones learn to look back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

NAMES = {"Anna": "She", "Mia": "She", "Ben": "He", "Tom": "He"}
ANIMALS = ("fox", "owl", "cat", "bear")
COLORS = ("red", "blue", "green", "golden")
THINGS = ("ball", "boat", "kite", "lamp")
PLACES = ("garden", "forest", "river", "hill")

PROMPT = "Once upon a time Anna had a golden kite. One day Anna"


def tale(random: np.random.Generator) -> str:
    """One tale; its first sentences name who, what and where, and the others repeat them."""

    def pick(words: tuple[str, ...]) -> str:
        return words[random.integers(len(words))]

    name, friend = random.choice(list(NAMES), 2, replace=False)
    he, animal, place = NAMES[name], pick(ANIMALS), pick(PLACES)
    color, thing = pick(COLORS), pick(THINGS)
    middle = [
        f"{he} took the {color} {thing} to the {place}.",
        f"The {animal} saw the {color} {thing} and said: What a nice {thing}!",
        f"{friend} came to the {place} and played with {name} and the {animal}.",
        f"But the {color} {thing} was lost, and {name} was sad.",
        f"The {animal} found the {color} {thing} and gave it to {name}.",
    ]
    kept = np.sort(random.permutation(len(middle))[: random.integers(2, 5)])
    return " ".join(
        [
            f"Once upon a time {name} had a {color} {thing}.",
            f"One day {name} met a {animal} in the {place}.",
            *(middle[i] for i in kept),
            f"In the evening {name} took the {color} {thing} home, and {he.lower()} was happy.",
        ]
    )


def tales(count: int, *, seed: int = 0) -> list[str]:
    """The first `count` tales of a seed."""
    random = np.random.default_rng(seed)
    return [tale(random) for _ in range(count)]


def save_tokenizer(texts: list[str], folder: Path, *, size: int = 400) -> Any:
    """Train a byte-level tokenizer, which can encode any prompt, and save its tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer
