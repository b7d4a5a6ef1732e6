"""No verb makes an answer of predictions that are NaN or infinite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fuzz.values import Letters
from tests.helpers.training import digits, vit
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import everydepth as ed
from everydepth.errors import NonFiniteError
from everydepth.exits.certify import certify_depth
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
    "ablate": lambda m: ed.ablate(m, DATA, layers=1, c=0.5, **QUIET),
    "memorization": lambda m: ed.memorization(m, DATA, flipped=[1], **QUIET),
    "audit": lambda m: ed.audit(m, DATA, **QUIET),
    "certify_depth": lambda m: certify_depth(m, UNLABELLED, risk=0.2, **QUIET),
    "certify_depth by labels": lambda m: certify_depth(
        m, DATA, risk=0.2, against="labels", **QUIET
    ),
    "gradient_study": lambda m: ed.gradient_study(m, DATA, DATA, flipped=[1], **QUIET),
    "paired": lambda m: ed.growth.paired(m, m, DATA),
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
    first = 0 if verb.startswith(("trace", "memorization", "audit")) else 1
    first = 3 if verb == "gradient_study" else first
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


def speaking(where: str) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3, "vocab_size": 24}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).eval()
    part = model.model.layers[1].mlp.down_proj if where == "block" else model.lm_head
    with torch.no_grad():
        part.weight[0, 0] = torch.nan
    return model


@pytest.mark.parametrize("how", [{}, {"draft_depth": 1}, {"do_sample": True}, {"depth": 2}])
@pytest.mark.parametrize("where", ["block", "head"])
def test_no_token_is_written_of_a_model_that_gives_no_number(
    how: dict[str, Any], where: str
) -> None:
    words = "first appears after block 2" if where == "block" else "predictions at depth 1"
    with pytest.raises(NonFiniteError, match=words):
        ed.generate(speaking(where), torch.tensor([[3, 4]]), max_new_tokens=3, **how)


@pytest.mark.parametrize("where", ["block", "head"])
def test_no_text_is_shown_of_a_model_that_gives_no_number(where: str) -> None:
    words = "first appears after block 2" if where == "block" else "predictions at depth"
    for show in (lambda *given: ed.text_at_depth(*given, new_tokens=3), ed.token_grid):
        prompt: Any = ["ab"] if show is not ed.token_grid else "ab"
        with pytest.raises(NonFiniteError, match=words):
            show(speaking(where), Letters(), prompt)


@pytest.mark.parametrize("by", ["influence", "span", "loss"])
def test_no_block_is_chosen_by_what_is_no_number(by: Any) -> None:
    with pytest.raises(NonFiniteError, match="first appears after block 2"):
        ed.choose_blocks(broken("block", torch.nan), DATA, keep=1, by=by, **QUIET)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["block", "head"])
def test_no_objective_is_approved_and_nothing_is_written_of_no_number(
    where: str, value: float, tmp_path: Path
) -> None:
    model = broken(where, value)
    with pytest.raises(NonFiniteError):
        ed.check_objective(ed.EveryDepth(model), DATA)
    with pytest.raises(NonFiniteError):
        ed.export(model, tmp_path / "out", depth=3)
    assert not (tmp_path / "out").exists()


def test_a_skip_that_is_scaled_beyond_all_numbers_is_said() -> None:
    said = "with the skip of layer 2 scaled by 1e\\+38, predictions"
    with pytest.raises(NonFiniteError, match=said):
        ed.ablate(vit(), DATA, layers=2, c=1e38, **QUIET)
