"""Policies: what certainty is, when a row leaves, how a policy travels and whom it accepts."""

from __future__ import annotations

import math

import pytest
import torch
from tests.zoo import ENTRIES

from everydepth.errors import PolicyError, SettingError, UnsupportedModelError
from everydepth.exits.identity import identity
from everydepth.exits.policies import (
    NEVER,
    POLICIES,
    Agreement,
    Certificate,
    Confidence,
    Entropy,
    Margin,
    Patience,
    Policy,
    exit_depths,
    layer_speedup,
)
from everydepth.stream import as_stream

LOGITS = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 5.0]], dtype=torch.float64)


def test_confidence_entropy_and_margin_are_what_they_say() -> None:
    for row, p in enumerate(LOGITS.softmax(-1).tolist()):
        best = sorted(p, reverse=True)
        entropy = -sum(x * math.log(x) for x in p)
        for policy, expected in (
            (Confidence(threshold=0.5), best[0]),
            (Margin(threshold=0.5), best[0] - best[1]),
            (Entropy(threshold=0.5), 1 - entropy / math.log(3)),
        ):
            assert float(policy.certainty(LOGITS, ())[0][row]) == pytest.approx(expected, abs=1e-12)


def test_a_uniform_prediction_has_no_certainty_by_entropy_and_margin() -> None:
    flat = torch.zeros(1, 4)
    assert float(Entropy(threshold=0.5).certainty(flat, ())[0]) == pytest.approx(0, abs=1e-6)
    assert float(Margin(threshold=0.5).certainty(flat, ())[0]) == 0


def test_patience_counts_equal_predictions_in_a_row() -> None:
    classes = [0, 1, 1, 1, 2, 2]
    policy, memory, counts = Patience(threshold=2), (), []
    for found in classes:
        count, memory = policy.certainty(torch.eye(3)[[found]], memory)
        counts.append(int(count))
    assert counts == [0, 0, 1, 2, 0, 1]


def test_agreement_is_the_overlap_with_the_depth_before_if_the_class_is_the_same() -> None:
    policy = Agreement(threshold=0.5)
    first, memory = policy.certainty(LOGITS, ())
    assert first.tolist() == [0, 0]
    changed = LOGITS.clone()
    changed[0] = torch.tensor([0.0, 1.0, 0.0])
    second, _ = policy.certainty(changed, memory)
    assert second[0] == 0
    assert float(second[1]) == pytest.approx(1)


def test_half_precision_logits_do_not_round_certainty() -> None:
    logits = torch.tensor([[9.0, 0.0]], dtype=torch.bfloat16)
    score, _ = Confidence(threshold=0.5).certainty(logits, ())
    assert 0.9998 < float(score) < 0.99999


def test_a_row_leaves_at_the_first_depth_that_reaches_its_threshold() -> None:
    certainty = torch.tensor([[0.5, 0.9, 0.9], [0.8, 0.1, 0.1], [0.1, 0.2, 0.3]])
    thresholds = torch.tensor([0.8, NEVER, 0.9])
    assert exit_depths(certainty, thresholds).tolist() == [3, 1, 4]


def test_layer_speedup_counts_blocks() -> None:
    # The layer speed-up is sum_i L m_i / sum_i i m_i, with two at depth 1 and one at depth 4.
    assert layer_speedup(torch.tensor([1, 1, 4]), 4) == pytest.approx(12 / 6)


@pytest.mark.parametrize("kind", sorted(POLICIES))
def test_json_gives_the_same_policy_back(kind: str) -> None:
    certificate = Certificate(
        certified=True,
        risk=0.1,
        delta=0.05,
        against="full",
        samples=9,
        observed=0.0,
        p_value=0.01,
        speedup=1.5,
        note="",
    )
    model, _ = ENTRIES["ViT"].make()
    policy = POLICIES[kind](
        threshold=(1.0, NEVER, 1.0), model=identity(as_stream(model)), certificate=certificate
    )
    assert Policy.from_json(policy.to_json()) == policy
    assert "Infinity" not in policy.to_json()


def test_a_single_threshold_survives_json(tmp_path) -> None:
    Confidence(threshold=0.75).save(tmp_path / "policy.json")
    assert Policy.load(tmp_path / "policy.json") == Confidence(threshold=0.75)
    with pytest.raises(PolicyError, match=r"the policy cannot be read: No such file .*none.json"):
        Policy.load(tmp_path / "none.json")


@pytest.mark.parametrize("text", ["{}", "[1]", '{"format": 7, "policy": "confidence"}', "no"])
def test_text_that_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(PolicyError, match="calibrate again"):
        Policy.from_json(text)


def test_an_unknown_kind_of_policy_is_named() -> None:
    text = Confidence(threshold=0.5).to_json().replace("confidence", "courage")
    with pytest.raises(SettingError, match="policy 'courage'; use one of 'confidence'"):
        Policy.from_json(text)


@pytest.mark.parametrize(
    ("policy", "value"),
    [(Confidence, 1.5), (Margin, -0.1), (Entropy, float("nan")), (Patience, 0)],
)
def test_a_threshold_out_of_range_is_refused(policy: type[Policy], value: float) -> None:
    with pytest.raises(SettingError, match=rf"{policy.__name__} with threshold {value}; use"):
        policy(threshold=value)


def test_a_policy_for_another_number_of_depths_is_refused() -> None:
    model, _ = ENTRIES["ViT"].make()
    with pytest.raises(PolicyError, match=r"thresholds for 6 depths, but ViT.* has 4; calibrate"):
        Confidence(threshold=(0.5,) * 5).for_stream(as_stream(model))


def test_a_policy_for_other_weights_is_refused() -> None:
    model, _ = ENTRIES["ViT"].make()
    policy = Confidence(threshold=0.5, model=identity(as_stream(model)))
    policy.for_stream(as_stream(model))
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)
    with pytest.raises(PolicyError, match=r"was calibrated on ViT.*calibrate again"):
        policy.for_stream(as_stream(model))


def test_the_identity_of_a_copy_is_the_same_and_of_another_seed_is_not() -> None:
    model, _ = ENTRIES["ViT"].make()
    twin, _ = ENTRIES["ViT"].make()
    assert identity(as_stream(model)) == identity(as_stream(twin))
    torch.manual_seed(1)
    assert identity(as_stream(ENTRIES["ViT"].build())) != identity(as_stream(model))


@pytest.mark.parametrize("name", ["Llama-tied-CausalLM-left", "Bert-MaskedLM", "Detr-plain"])
def test_a_model_that_is_no_classifier_is_told_what_to_use(name: str) -> None:
    model, _ = ENTRIES[name].make()
    with pytest.raises(UnsupportedModelError, match=r"everydepth\.generate.*everydepth\.at_depth"):
        Confidence(threshold=0.5).for_stream(as_stream(model))
