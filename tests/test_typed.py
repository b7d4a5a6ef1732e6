"""While tests run, wrong types and shapes that do not fit together are errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation
from jaxtyping import TypeCheckError

from everydepth.ablations.memorize import wilson
from everydepth.exits.policies import exit_depths


def test_a_wrong_type_is_an_error() -> None:
    wrong: Any = "eight"
    with pytest.raises(BeartypeCallHintParamViolation):
        wilson(wrong, 10)


def test_shapes_that_do_not_fit_together_are_an_error() -> None:
    with pytest.raises(TypeCheckError):
        exit_depths(torch.rand(4, 3), torch.rand(2))


def test_checks_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    wrong: Any = "eight"
    with pytest.raises(TypeError):  # scipy's own
        wilson(wrong, 10)
