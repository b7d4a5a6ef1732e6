"""Synthetic tales that a small model learns in seconds, without a download.

A grammar generates them. Who, where and what are named once and needed again several sentences
later: shallow depths learn the grammar, deeper ones learn to look back.
"""

from __future__ import annotations

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
