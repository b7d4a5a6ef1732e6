"""Intervals, rank correlations, and the three measurements of every layer side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.helpers.gradients import labeled

import everydepth as ed
from everydepth.errors import SettingError
from everydepth.reports.cards import card
from everydepth.results.figures.kinds import charts
from everydepth_papers.statistics import interval, spearman
from everydepth_papers.unified import unified_view


def test_the_interval_of_three_runs_is_students() -> None:
    low, high = interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5))
    assert np.isnan(interval([1.0])[0])


def test_spearman_agrees_with_scipy() -> None:
    from scipy.stats import spearmanr

    a, b = np.array([1.0, 5.0, 2.0, 2.0, 9.0]), np.array([3.0, 1.0, 4.0, 1.0, 5.0])
    assert spearman(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert np.isnan(spearman(a, np.ones(5)))


def test_ranks_that_do_not_exist_have_no_correlation() -> None:
    assert np.isnan(spearman([], []))
    assert np.isnan(spearman([1.0], [2.0]))
    assert np.isnan(spearman([1.0, np.nan, 2.0], [1.0, 2.0, 3.0]))


def test_infinite_values_have_ranks_but_no_mean() -> None:
    assert spearman([1.0, 2.0, np.inf], [1.0, 2.0, 3.0]) == 1.0
    assert interval([1.0, 2.0, np.inf]) == interval([1.0, 2.0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: interval([1.0, 2.0], 95),
            r"interval\(confidence=95.0\); use a number above 0 and below 1",
        ),
        (
            lambda: interval([1.0, 2.0], 1.0),
            r"interval\(confidence=1.0\); use a number above 0 and below 1",
        ),
        (lambda: interval(np.ones((2, 3))), r"values has the shape \(2, 3\); use one axis"),
        (lambda: interval(["a", "b"]), r"interval\(values=\['a', 'b'\]\); use several, each a num"),
        (lambda: spearman([1.0, 2.0], [1.0]), "a has 2 values and b 1; pass one of each"),
        (lambda: spearman(np.ones((2, 2)), np.ones((2, 2))), "a has the shape .* use one axis"),
    ],
)
def test_arguments_without_an_answer_are_refused(call: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        call()


def test_the_unified_view_joins_study_and_ablation() -> None:
    model, batch = labeled("ViT")
    study = ed.gradient_study(model, batch, batch, flipped=[0])
    view = unified_view(study, ed.ablate(model, batch, c=(0.0,)))
    for result in view.results.values():
        assert not any("could not be drawn" in note for note in card({"a": result}).notes)
    (chart,) = charts({"": view.result("margin_against_gradient")})
    (dots,) = chart.marks
    assert dots.text == ("layer 1", "layer 2", "layer 3", "layer 4")  # pyright: ignore[reportAttributeAccessIssue]
    assert set(view.spearman) == {
        "gradient_norm/margin",
        "gradient_norm/accuracy",
        "margin/accuracy",
    }
    with pytest.raises(SettingError, match="ablate all layers of the same model"):
        unified_view(study, ed.ablate(model, batch, layers=1, c=0.0))
    with pytest.raises(SettingError, match=r"c=0.0, but this ablation has 0.5"):
        unified_view(study, ed.ablate(model, batch, c=0.5))
