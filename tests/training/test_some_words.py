"""A part of a vocabulary that stands for all of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.zoo import ENTRIES

import everydepth as ed
from everydepth.errors import SettingError
from everydepth.training.some_words import some_words


def head(classes: int = 400) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(classes, 8, generator=generator)
    return torch.randn(5, 8, generator=generator), weight, weight[:, 0].clone()


@pytest.mark.parametrize("biased", [False, True])
def test_sums_over_drawn_words_are_right_on_average(biased: bool) -> None:
    rows, weight, bias = head()
    expected = (rows @ weight.T + biased * bias).exp().sum(1)
    found = torch.zeros_like(expected)
    for seed in range(300):
        random = np.random.default_rng(seed)
        w, b = some_words(rows, weight, bias if biased else None, 64, random)
        assert b is not None
        found += (rows @ w.T + b).exp().sum(1) / 300
    assert torch.allclose(found, expected, rtol=0.05)


def test_the_likely_words_are_always_among_them() -> None:
    rows, weight, _ = head()
    likely = (rows @ weight.T).argmax(1)
    found, offset = some_words(rows, weight, None, 64, np.random.default_rng(0))
    assert offset is not None
    for word in likely:
        place = (found == weight[word]).all(1).nonzero()
        assert len(place) == 1
        assert offset[place].item() == 0


def test_a_small_vocabulary_stays_whole() -> None:
    rows, weight, bias = head()
    assert some_words(rows, weight, bias, 400, np.random.default_rng(0)) == (weight, bias)


def net(words: int | None) -> tuple[ed.EveryDepth, dict[str, Any]]:
    model, batch = ENTRIES["Llama-tied-CausalLM-left"].make()
    goal = ed.ladder([1], early=1.0).distilled(labels=False, words=words)
    wrapped = ed.balcony(model.eval(), [1], objective=goal).train()
    wrapped.any_depth_loss = True
    return wrapped, {"input_ids": batch["input_ids"].clamp(min=2)}  # no padding


def test_training_compares_some_words_and_evaluation_all() -> None:
    (some, batch), (whole, _) = net(32), net(None)
    trained, again = (some(**batch).loss.item() for _ in range(2))
    assert trained != again, "another step draws other words"
    some.set_progress(0)
    assert some(**batch).loss.item() == trained, "the same step draws the same"
    expected = whole(**batch).loss.item()
    assert trained != expected
    assert trained == pytest.approx(expected, rel=0.5)
    assert some.eval()(**batch).loss.item() == pytest.approx(expected, rel=1e-5)


def test_words_are_not_for_depths_that_learn_from_labels() -> None:
    with pytest.raises(
        SettingError, match="words=64 with labels=True, but a label may be any word"
    ):
        ed.ladder().distilled(words=64)
