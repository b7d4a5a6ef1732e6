"""No verb makes an answer of predictions that are NaN or infinite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.training import digits, vit
from torch import nn

import everydepth as ed
from everydepth.errors import NonFiniteError
from everydepth.exits.policies import policy_class

DATA = digits(12).batch(range(12))
UNLABELLED = {"pixel_values": DATA["pixel_values"]}
QUIET: dict[str, Any] = {"progress": False}


def policy(name: str) -> Any:
    return policy_class(name)(threshold={"patience": 1, "agreement": 0.5}.get(name, 0.9))


VERBS: dict[str, Callable[[nn.Module], Any]] = {
    "trace": lambda m: ed.trace(m, DATA, ["accuracy"], **QUIET),
    "trace of decisions": lambda m: ed.trace(m, UNLABELLED, ["saturation"], **QUIET),
    "profile": lambda m: ed.profile(m, DATA, repeats=1, **QUIET),
    "profile without labels": lambda m: ed.profile(m, UNLABELLED, repeats=1, **QUIET),
    "evaluate": lambda m: ed.evaluate(m, DATA, policy("confidence"), **QUIET),
    "calibrate": lambda m: ed.calibrate(m, UNLABELLED, risk=0.2, **QUIET),
    "calibrate patience": lambda m: ed.calibrate(
        m, DATA, risk=0.2, against="labels", policy="patience", **QUIET
    ),
    "predict": lambda m: ed.predict(m, UNLABELLED, policy=policy("confidence")),
    "predict with patience": lambda m: ed.predict(m, UNLABELLED, policy=policy("patience")),
    "predict at the end": lambda m: ed.predict(m, UNLABELLED, policy=ed.Confidence(threshold=1.0)),
}


def broken(where: str, value: float) -> nn.Module:
    model: Any = vit()
    with torch.no_grad():
        if where == "block":
            model.vit.layers[1].mlp.fc1.bias[0] = value
        else:
            model.classifier.bias[2] = value
    return model


@pytest.mark.parametrize("verb", VERBS)
def test_nan_in_a_block_is_an_error_that_names_it(verb: str) -> None:
    with pytest.raises(NonFiniteError, match="first appears after block 2") as caught:
        VERBS[verb](broken("block", torch.nan))
    assert caught.value.depth == 2


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("verb", VERBS)
def test_a_head_that_gives_no_number_is_an_error_that_names_the_first_depth(
    verb: str, value: float
) -> None:
    first = 0 if "trace" in verb else 1
    with pytest.raises(NonFiniteError, match=f"predictions at depth {first} of .*the head") as it:
        VERBS[verb](broken("head", value))
    assert it.value.depth == first


@pytest.mark.filterwarnings("ignore::everydepth.exits.calibrate.NotCertifiedWarning")
@pytest.mark.parametrize("verb", VERBS)
def test_a_class_that_is_ruled_out_is_no_error(verb: str) -> None:
    VERBS[verb](broken("head", -torch.inf))


def test_one_bad_row_is_found_among_good_ones() -> None:
    pixels = DATA["pixel_values"].clone()
    pixels[7, 0, 0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"after the embedding .* in 1 of 12 rows"):
        ed.predict(vit(), {"pixel_values": pixels}, policy=policy("entropy"))
