"""The 1,797 handwritten digits that come with scikit-learn: real images, no download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from everydepth.config import Seed, checked
from everydepth.data.reading import pick_split
from everydepth.data.sets import Images


@checked
def load_digits(
    split: str = "train", *, seed: Seed = 0, fractions: Sequence[float] = (0.7, 0.1, 0.2)
) -> Images:
    """The 8x8 digits in 0..1, split into train, valid and test by class; "all" is unsplit.

    >>> digits = load_digits("test")
    >>> digits.pixel_values.shape, len(digits.classes)
    (torch.Size([359, 1, 8, 8]), 10)
    """
    # Imported here: scikit-learn takes a second to import, and only the digits need it.
    from sklearn.datasets import load_digits as from_sklearn

    bunch: Any = from_sklearn()
    # Pixels count dark dots in a 4x4 cell, so they run from 0 to 16.
    pixels = torch.from_numpy(np.asarray(bunch["images"], dtype=np.float32) / 16).unsqueeze(1)
    labels = torch.from_numpy(np.asarray(bunch["target"], dtype=np.int64))
    digits = Images(pixels, labels, classes=tuple("0123456789"))
    if split == "all":
        return digits
    names = ("train", "valid", "test")[: len(fractions)]
    part = pick_split("digits", split, {name: place for place, name in enumerate(names)})
    return digits.split(fractions, seed, stratified=True)[part]
