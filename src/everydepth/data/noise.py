"""Deliberately wrong labels, with a record of which were changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from everydepth.config import Seed, checked
from everydepth.data.sets import random_stream
from everydepth.errors import DataError


@checked
@dataclass(frozen=True, eq=False)
class NoisyLabels:
    """Labels after the noise, the flipped rows (ascending), and the labels before."""

    labels: Int[Tensor, " rows"]
    flipped: Int[Tensor, " flipped"]
    original: Int[Tensor, " rows"]


@checked
def flip_labels(
    labels: Tensor | Sequence[int],
    fraction: float,
    *,
    of_class: int | None = None,
    classes: int | None = None,
    seed: Seed = 0,
) -> NoisyLabels:
    """Give a `fraction` of the rows, of one class or of all, a uniformly random different label.

    classes: the number of classes; by default the largest label plus one. The number of flipped
    rows is the fraction times the rows, rounded.

    >>> found = flip_labels(train.labels, 0.1)
    >>> len(found.flipped) == round(0.1 * len(train))
    True
    >>> bool((found.labels != found.original)[found.flipped].all())
    True
    """
    original = torch.as_tensor(labels)
    if original.is_floating_point() or original.ndim != 1:
        raise DataError(
            f"labels of {original.dtype} with shape {tuple(original.shape)}, but they must be "
            "whole numbers in one dimension; use labels.long().flatten()"
        )
    original = original.long()
    count = _number_of_classes(original, classes)
    if not 0 <= fraction <= 1:
        raise DataError(
            f"fraction {fraction}, but it must be from 0 to 1; for 5 % noise use fraction=0.05"
        )
    candidates = _candidates(original, of_class)
    amount = round(fraction * len(candidates))
    if amount == 0 and fraction > 0:
        whose = "all classes" if of_class is None else f"class {of_class}"
        raise DataError(
            f"fraction {fraction} of {len(candidates)} sample(s) of {whose} flips none; "
            f"use a fraction above {0.5 / len(candidates):.3g} or more samples"
        )
    random = random_stream(seed)
    flipped = candidates[torch.from_numpy(random.permutation(len(candidates))[:amount])]
    flipped = flipped.sort().values
    # One of the other `count - 1` labels: numbers from the old label up move by one.
    other = torch.from_numpy(random.integers(0, count - 1, size=amount))
    noisy = original.clone()
    noisy[flipped] = other + (other >= original[flipped]).long()
    return NoisyLabels(labels=noisy, flipped=flipped, original=original)


def _number_of_classes(labels: Tensor, classes: int | None) -> int:
    if len(labels) == 0:
        raise DataError("labels is empty, but at least one is needed; check the dataset")
    count = int(labels.max()) + 1 if classes is None else classes
    if count < 2:
        raise DataError(f"{count} class(es), but a different label needs at least 2; give classes=")
    outside = labels[(labels < 0) | (labels >= count)]
    if len(outside):
        raise DataError(
            f"label {outside[0].item()}, but with {count} classes labels run from 0 to "
            f"{count - 1}; give classes= or correct the labels"
        )
    return count


def _candidates(labels: Tensor, of_class: int | None) -> Tensor:
    if of_class is None:
        return torch.arange(len(labels))
    found = (labels == of_class).nonzero().flatten()
    if len(found) == 0:
        present = ", ".join(map(str, labels.unique().tolist()))
        raise DataError(f"of_class {of_class}, but the labels hold {present}; use one of these")
    return found
