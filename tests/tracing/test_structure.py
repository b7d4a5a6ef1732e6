"""Neural collapse and distinguishability against direct numpy and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors
from tests.helpers import tracing as samples
from torch import nn

import everydepth as ed
from everydepth.tracing import FeatureRows
from everydepth.tracing.metrics.structure import NeuralCollapse


def collapse(h: np.ndarray, y: np.ndarray, weight: np.ndarray) -> list[float]:
    """With the covariance matrices themselves and numpy's pseudo-inverse."""
    classes = np.unique(y)
    k = len(classes)
    means = np.stack([h[y == c].mean(0) for c in classes])
    within = sum((h[y == c] - m).T @ (h[y == c] - m) for c, m in zip(classes, means, strict=True))
    centered = means - means.mean(0)
    between = centered.T @ centered / k
    ratio = np.trace(within / len(h) @ np.linalg.pinv(between, rcond=1e-8))
    norms = np.linalg.norm(centered, axis=1)
    angles = (centered / norms[:, None]) @ (centered / norms[:, None]).T
    off = angles[~np.eye(k, dtype=bool)]
    w = weight[classes]
    nc3 = np.linalg.norm(w / np.linalg.norm(w) - centered / np.linalg.norm(centered))
    return [
        ratio / k,
        norms.std() / norms.mean(),
        np.abs(off + 1 / (k - 1)).mean(),
        nc3,
        np.log(ratio),
    ]


@torch.no_grad()
def normed(model: nn.Module, data: dict[str, torch.Tensor]) -> np.ndarray:
    stream = ed.as_stream(model)
    states = stream.observe({"pixel_values": data["pixel_values"]})
    return np.stack(
        [stream.normed(states.feature(i), i).double().numpy() for i in range(len(states))]
    )


def test_neural_collapse_agrees_with_the_covariance_matrices() -> None:
    model, data = samples.vit(), samples.pictures(150)
    t = ed.trace(model, data, ["neural_collapse"], batch_size=11, progress=False)
    h, y = normed(model, data), data["labels"].numpy()
    weight = model.classifier.weight.detach().double().numpy()
    for depth in range(1, 4):
        expected = collapse(h[depth], y, weight)
        result = t.result("neural_collapse")
        for name, value in zip(result.series, expected, strict=True):
            assert result.arrays[name][depth] == pytest.approx(value, rel=1e-5), name


def test_collapsed_classes_have_no_variance_within_and_equal_angles() -> None:
    # A simplex: one point per class, repeated; the head is the simplex itself.
    model = samples.mlp(regression=False, num_outputs=3, hidden_size=3)
    simplex = torch.eye(3) - 1 / 3
    with torch.no_grad():
        model.head.weight.copy_(simplex)
    y = torch.arange(30) % 3
    stream = ed.as_stream(model)
    noise = 1e-4 * torch.randn(30, 3)
    features = (simplex[y] + noise).expand(5, -1, -1)
    metric = NeuralCollapse()
    for second in (False, True):
        metric.update(FeatureRows(stream, features, y, second=second))
    found = metric.compute()
    for name in ("nc1", "nc2_norms", "nc2_angles", "nc3"):
        assert found.arrays[name].max() < 1e-3, name
    assert found.arrays["separation"].max() < -10


def test_neighbors_and_gaps_agree_with_scikit_learn() -> None:
    model, data = samples.vit(), samples.pictures(90)
    t = ed.trace(model, data, ["distinguishability"], batch_size=11, progress=False)
    h, y = samples.features(model, data), data["labels"].numpy()
    result = t.result("distinguishability")
    for depth in range(1, 4):
        x = h[depth]
        places = NearestNeighbors(n_neighbors=10).fit(x).kneighbors(return_distance=False)
        for k in (1, 5, 10):
            expected = (y[places[:, :k]] != y[:, None]).mean()
            assert result.arrays[f"different_{k}"][depth] == pytest.approx(expected)
        distance = np.linalg.norm(x[:, None] - x, axis=-1)
        upper = np.triu(np.ones_like(distance, dtype=bool), 1)
        other = upper & (y[:, None] != y)
        expected = np.quantile(distance[other], 0.01) / np.median(distance[upper])
        assert result.arrays["gap"][depth] == pytest.approx(expected, rel=1e-5)


def test_rows_without_a_label_do_not_count() -> None:
    model, data = samples.vit(), samples.pictures(60)
    some = {**data, "labels": torch.where(torch.arange(60) < 40, data["labels"], -100)}
    first = {key: value[:40] for key, value in data.items()}
    names = ["neural_collapse", "distinguishability", "loss", "accuracy"]
    a, b = (ed.trace(model, d, names, progress=False) for d in (some, first))
    for name in names:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5)
