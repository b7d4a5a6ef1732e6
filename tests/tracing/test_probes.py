"""A probe finds what a depth knows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from tests.helpers import tracing as samples

import everydepth as ed
from everydepth.errors import LabelError, SettingError


def test_a_probe_is_a_logistic_regression_on_each_depths_features() -> None:
    model, train, test = samples.vit(), samples.pictures(80), samples.pictures(40, seed=5)
    for data in (train, test):  # another task than the model's: is the picture bright?
        data["labels"] = (data["pixel_values"].mean((1, 2, 3)) > 0).long()
    found = ed.linear_probe(model, train, test, batch_size=9, progress=False)
    x, x_test = samples.features(model, train), samples.features(model, test)
    for depth in (1, 3):
        scaler = StandardScaler().fit(x[depth])
        probe = LogisticRegression(max_iter=500).fit(
            scaler.transform(x[depth]), train["labels"].numpy()
        )
        expected = probe.score(scaler.transform(x_test[depth]), test["labels"].numpy())
        assert found.value[depth] == pytest.approx(expected, abs=1 / 40)
    assert found.arrays["train"][-1] > found.arrays["train"][0]
    assert found.meta["chance"] >= 0.5


def test_a_probe_needs_labels_of_two_classes() -> None:
    data = samples.pictures(10)
    bare = {"pixel_values": data["pixel_values"]}
    with pytest.raises(LabelError, match="a linear probe needs labels, but the batch has keys"):
        ed.linear_probe(samples.vit(), bare, data, progress=False)
    one = {**data, "labels": torch.zeros(10, dtype=torch.long)}
    with pytest.raises(LabelError, match="all 10 training samples have label 0"):
        ed.linear_probe(samples.vit(), one, data, progress=False)
    with pytest.raises(SettingError, match=r"strength=0\.0\); use a number above 0"):
        ed.linear_probe(samples.vit(), data, data, strength=0.0, progress=False)


def test_rows_without_a_label_are_left_out() -> None:
    data = samples.pictures(30)
    data["labels"][::3] = -100
    found = ed.linear_probe(samples.vit(), data, data, progress=False)
    assert found.meta["train_samples"] == 20
    assert np.isfinite(found.value).all()
