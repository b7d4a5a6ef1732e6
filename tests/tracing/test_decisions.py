"""Saturation, effective depth and margins against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.helpers import tracing as samples

import everydepth as ed
from everydepth.errors import SettingError
from everydepth.tracing import effective_depth
from everydepth.tracing.metrics.decisions import saturation_depth


def first_stable(column: list[int]) -> int:
    """The smallest l with column[l] == column[l + 1] == ... == column[-1], by trying."""
    return next(i for i in range(len(column)) if all(v == column[-1] for v in column[i:]))


@given(
    hnp.arrays(
        np.int64, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=st.integers(0, 2)
    )
)
def test_saturation_is_the_first_depth_that_agrees_with_all_later_ones(top: np.ndarray) -> None:
    import torch

    found = saturation_depth(torch.from_numpy(top)).tolist()
    assert found == [first_stable(column) for column in top.T.tolist()]


def test_the_histogram_counts_each_prediction_once() -> None:
    model, data = samples.vit(), samples.pictures(80)
    t = ed.trace(model, data, ["saturation", "prediction_depth"], batch_size=9, progress=False)
    top = samples.logits(model, data).argmax(-1)
    expected = np.array([first_stable(column) for column in top.T.tolist()])
    result = t.result("saturation")
    assert t["saturation"].tolist() == np.bincount(expected, minlength=4).tolist()
    np.testing.assert_allclose(
        result.arrays["cumulative"], [(expected <= depth).mean() for depth in range(4)]
    )
    assert result.meta["mean_depth"] == pytest.approx(expected.mean())
    assert t["prediction_depth"].tolist() == expected.tolist()
    right = top == data["labels"].numpy()
    by_hand = [next((i for i in range(4) if all(column[i:])), 4) for column in right.T.tolist()]
    assert t.result("prediction_depth").arrays["right_from"].tolist() == by_hand
    assert len(set(by_hand)) > 1


def test_saturation_of_a_language_model_counts_real_tokens() -> None:
    model, data = samples.gpt2(), samples.sentences()
    t = ed.trace(model, data, ["saturation", "prediction_depth"], progress=False)
    assert t["saturation"].sum() == int(data["attention_mask"].sum())
    sample = t.result("prediction_depth").arrays["sample"]
    assert np.bincount(sample).tolist() == data["attention_mask"].sum(1).tolist()


def test_the_margin_is_the_distance_of_the_two_largest_logits() -> None:
    model, data = samples.vit(), samples.pictures(70)
    t = ed.trace(model, data, ["margin"], batch_size=8, progress=False)
    ordered = np.sort(samples.logits(model, data), -1)
    each = ordered[..., -1] - ordered[..., -2]
    np.testing.assert_allclose(t["margin"], each.mean(1), rtol=1e-5)
    np.testing.assert_allclose(
        t.result("margin").arrays["q05"], np.quantile(each, 0.05, axis=1), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("epsilon", "expected"),
    [(0.0, (4, 4)), (0.05, (4, 3)), (0.1, (4, 2)), (0.2, (2, 2)), (0.9, (1, 0)), (1.0, (0, 0))],
)
def test_effective_depth_in_both_forms(epsilon: float, expected: tuple[int, int]) -> None:
    accuracy = np.array([0.0, 0.1, 0.8, 0.85, 0.9])
    assert effective_depth(accuracy, epsilon) == expected


def test_an_accuracy_never_reached_gives_the_last_depth() -> None:
    assert effective_depth(np.array([0.1, 0.2, 0.3]), 0.0)[0] == 2


def test_epsilon_is_a_share() -> None:
    with pytest.raises(SettingError, match=r"epsilon=1\.5\); use a number from 0 up to 1"):
        effective_depth(np.array([0.5]), 1.5)


def test_the_table_of_effective_depths_follows_the_accuracy() -> None:
    t = ed.trace(
        samples.vit(), samples.pictures(60), ["effective_depth", "accuracy"], progress=False
    )
    result = t.result("effective_depth")
    for i, epsilon in enumerate(result.arrays["epsilon"]):
        both = effective_depth(t["accuracy"], float(epsilon))
        assert (result.arrays["absolute"][i], result.arrays["relative"][i]) == both


def test_of_samples_that_come_closer_those_whose_label_gains_probability_are_counted() -> None:
    model, data = samples.vit(), samples.pictures(40)
    t = ed.trace(model, data, ["probability_rises"], batch_size=9, progress=False)
    h = samples.features(model, data)[1:]
    unit = h / np.linalg.norm(h, axis=-1, keepdims=True)
    near = (unit * unit[-1]).sum(-1)
    with torch.no_grad():
        states = ed.as_stream(model).observe(data)
        p = torch.stack([states.logits(d).softmax(-1) for d in range(1, len(states))]).numpy()
    of_label = p[:, np.arange(40), data["labels"].numpy()]
    closer, rises = np.diff(near, axis=0) > 0, np.diff(of_label, axis=0) > 0
    found = t.result("probability_rises")
    assert found.meta["share"] == pytest.approx(rises[closer].mean())
    np.testing.assert_allclose(
        found.value, [r[c].mean() for r, c in zip(rises, closer, strict=True)]
    )
    assert found.arrays["depth"].tolist() == [2, 3]
