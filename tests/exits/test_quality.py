"""The mean loss of a depth from some of its tokens, beside the last depth's at all of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from everydepth.exits.quality import Totals


def estimated(y: Tensor, x: Tensor, rows: Tensor) -> Totals:
    """Totals of two depths: losses `x` of the last at all tokens, `y` of the other at `rows`."""
    totals = Totals("perplexity", 2)
    totals.count, totals.drawn, totals.sums[-1] = len(x), len(rows), x.sum()
    some, last = y[rows], x[rows]
    moments = (some, some * some, last * some, last, last * last)
    totals.moments[:, 0] = torch.stack(moments).sum(1)
    return totals


def losses(likeness: float) -> tuple[Tensor, Tensor]:
    """Losses of 1,000 tokens at an inner and at the last depth."""
    random = torch.Generator().manual_seed(0)
    x, other = torch.randn(2, 1000, generator=random, dtype=torch.float64) * 3 + 8
    return likeness * x + (1 - likeness) * other, x


@pytest.mark.parametrize("likeness", [0.0, 0.5, 0.9])
def test_the_standard_error_of_a_depth_is_right_and_the_least(likeness: float) -> None:
    y, x = losses(likeness)
    away: list[float] = []
    errors: dict[str, list[float]] = {"regression": [], "own mean": [], "difference": []}
    for seed in range(200):
        rows = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))[:125]
        totals = estimated(y, x, rows)
        low, high = totals.band(1)
        off = math.log(totals.quality(1)) - float(y.mean())
        away.append(off / (math.log(high / low) / 2))
        errors["regression"].append(off)
        errors["own mean"].append(float(y[rows].mean() - y.mean()))
        errors["difference"].append(float((y - x)[rows].mean() + x.mean() - y.mean()))
    # The distance from the truth, in standard errors, has mean square 1.
    assert 0.8 < sum(a * a for a in away) / len(away) < 1.25
    size = {name: sum(e * e for e in found) for name, found in errors.items()}
    assert size["regression"] <= 1.05 * min(size.values())


def test_reading_every_token_leaves_no_error() -> None:
    y, x = losses(0.3)
    totals = estimated(y, x, torch.arange(1000))
    assert math.log(totals.quality(1)) == pytest.approx(float(y.mean()))
    assert totals.band(1) == (totals.quality(1),) * 2
