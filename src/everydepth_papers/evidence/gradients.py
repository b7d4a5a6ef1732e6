"""Gradients at the raw coordinates of every state: their covariance, and whether halves agree.

Depth Expansion's Figure 1 and Theorem 5 are about coordinates, not about sums over positions: a sum
correlates what was nearly uncorrelated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from everydepth.stream import as_stream, evaluating
from everydepth.stream.gradients import disagreement_bound, observe_gradients, spectrum

COORDINATES = 256  # drawn at random, of which the covariance is formed
SHOWN = 24  # of these, in a heat map
DRAWS = 200  # pairs of disjoint quarters of the rows
EDGES = np.linspace(-0.5, 0.5, 51)  # of the histogram, in mean variances


def raw_gradients(model: nn.Module, data: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What `of_rows` says of every state, depths 0..L. data: batches that it was not fitted on."""
    stream = as_stream(model)
    rows: list[list[torch.Tensor]] = []
    with evaluating(stream):
        for batch in data:
            _, _, taps = observe_gradients(stream, batch)
            rows.append([g.flatten(1).double().cpu() for g in taps.states])
    return [of_rows(torch.cat([part[depth] for part in rows])) for depth in range(len(rows[0]))]


def of_rows(g: torch.Tensor) -> dict[str, Any]:
    """Of the gradients of one state, one row per sample.

    within_1, within_10: share of off-diagonal covariances within 1 and 10 % of the mean variance.
    within_10_noise: the same share of half the difference of the two halves' covariances, which
    estimation alone makes so large. norm_over_variance: `||Sigma||_2` over the largest variance, of
    which Assumption 3 asks that it stays bounded. disagree: how often the mean gradients of two
    disjoint quarters of the rows do not point the same way; disagree_bound: Theorem 5's bound on
    it, 1 where it says nothing. histogram: of off-diagonal covariances over the mean variance,
    counts between `EDGES`, what lies beyond in the outer ones. matrix: a part of the covariance
    over the mean variance.
    """
    draw = torch.Generator().manual_seed(0)
    n, quarter = len(g), max(1, len(g) // 4)
    mean, centered = g.mean(0), g - g.mean(0)
    variances = centered.square().sum(0) / (n - 1)
    trace, top = spectrum(g)
    chosen = torch.randperm(g.shape[1], generator=draw)[:COORDINATES]
    part = centered[:, chosen]
    halves = [half.T @ half / len(half) for half in (part[0::2], part[1::2])]
    scale = max(float(variances[chosen].mean()), 1e-300)
    off = ~torch.eye(len(chosen), dtype=torch.bool)
    whole, noise = (
        matrix / scale for matrix in (part.T @ part / (n - 1), (halves[0] - halves[1]) / 2)
    )

    def within(matrix: torch.Tensor, share: float) -> float:
        return float((matrix[off].abs() <= share).double().mean())

    wrong = 0
    for _ in range(DRAWS):
        order = torch.randperm(n, generator=draw)
        one, other = g[order[:quarter]].mean(0), g[order[quarter : 2 * quarter]].mean(0)
        wrong += bool(one @ other <= 0)
    # Unbiased: the squared norm of a mean of n rows is too large by trace / n.
    squared = float(mean @ mean) - trace / n
    counts, _ = np.histogram(whole[off].numpy().clip(EDGES[0], EDGES[-1]), EDGES)
    return {
        "within_1": within(whole, 0.01),
        "within_10": within(whole, 0.1),
        "within_10_noise": within(noise, 0.1),
        "norm_over_variance": top / max(float(variances.max()), 1e-300),
        "disagree": wrong / DRAWS,
        "disagree_bound": disagreement_bound(squared, top, trace, quarter, quarter),
        "histogram": counts.tolist(),
        "matrix": whole[:SHOWN, :SHOWN].numpy().round(3).tolist(),
    }
