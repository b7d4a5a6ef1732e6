"""The baseline that a network must beat: a linear classifier on the same rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.functional import adaptive_avg_pool2d

MOST, SIDE = 60_000, 16  # rows, and pixels along a side after averaging: seconds, not minutes


def linear_accuracy(train: Any, test: Any, *, most: int = MOST, side: int = SIDE) -> float:
    """Test accuracy of a logistic regression on (averaged) pixels; images of any kind, by number.

    train: all rows that the network saw, as it saw them labeled; fewer would be an easier baseline.

    >>> from everydepth_papers.evidence.baselines import linear_accuracy
    >>> 0.5 < linear_accuracy(train.subset(range(200)), test) <= 1.0
    True
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    (x, y), (x_test, y_test) = (_pixels(rows, most, side) for rows in (train, test))
    scaler = StandardScaler().fit(x)
    model = LogisticRegression(C=0.1, max_iter=1000).fit(scaler.transform(x), y)
    return float(model.score(scaler.transform(x_test), y_test))


def _pixels(rows: Any, most: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    chosen = [rows[i] for i in range(min(most, len(rows)))]
    pixels = torch.stack([torch.as_tensor(row["pixel_values"]).float() for row in chosen])
    if pixels.shape[-1] > side:
        pixels = adaptive_avg_pool2d(pixels, side)
    return pixels.flatten(1).numpy(), np.array([int(row["labels"]) for row in chosen])
