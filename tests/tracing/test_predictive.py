"""Loss, accuracy and their kin against scikit-learn, the model's own loss and brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, log_loss, top_k_accuracy_score
from tests.helpers import tracing as samples

import everydepth as ed
from everydepth.tracing import predictions


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def traced() -> tuple[ed.Trace, np.ndarray, np.ndarray]:
    model, data = samples.vit(), samples.pictures(200)
    t = ed.trace(model, data, progress=False)
    return t, samples.logits(model, data), data["labels"].numpy()


def test_loss_accuracy_and_top5_agree_with_scikit_learn(
    traced: tuple[ed.Trace, np.ndarray, np.ndarray],
) -> None:
    t, z, y = traced
    classes = np.arange(samples.CLASSES)
    for depth, scores in enumerate(z):
        assert t["loss"][depth] == pytest.approx(log_loss(y, softmax(scores), labels=classes), 1e-5)
        assert t["accuracy"][depth] == accuracy_score(y, scores.argmax(1))
        assert t["top5"][depth] == top_k_accuracy_score(y, scores, k=5, labels=classes)
    assert len(set(z[-1].argmax(1))) > 2  # a model that always says one class tests nothing


def test_the_calibration_error_is_the_weighted_gap_in_bins(
    traced: tuple[ed.Trace, np.ndarray, np.ndarray],
) -> None:
    t, z, y = traced
    for depth, scores in enumerate(z):
        chance = softmax(scores)
        confidence, right = chance.max(1), chance.argmax(1) == y
        error = 0.0
        for low in np.arange(15) / 15:
            inside = (confidence > low) & (confidence <= low + 1 / 15)
            if inside.any():
                gap = abs(confidence[inside].mean() - right[inside].mean())
                error += inside.mean() * gap
        assert t["calibration"][depth] == pytest.approx(error, abs=1e-5)


def test_the_prediction_error_is_the_distance_to_the_label(
    traced: tuple[ed.Trace, np.ndarray, np.ndarray],
) -> None:
    t, z, y = traced
    expected = np.linalg.norm(softmax(z) - np.eye(samples.CLASSES)[y], axis=-1).mean(1)
    np.testing.assert_allclose(t["prediction_error"], expected, rtol=1e-5)


def test_monotonicity_counts_rises_of_the_mean_and_of_samples(
    traced: tuple[ed.Trace, np.ndarray, np.ndarray],
) -> None:
    t, z, y = traced
    each = -np.log(softmax(z))[:, np.arange(len(y)), y]
    mean = each.mean(1)
    found = t.result("monotonicity").arrays
    rise = np.diff(mean)
    assert found["rises"] == (rise > 0).sum()
    assert found["largest_rise"] == pytest.approx(max(rise.max(), 0), rel=1e-4)
    worst = rise.argmax()
    assert found["largest_relative_rise"] == pytest.approx(
        max(rise.max() / mean[worst], 0), rel=1e-4
    )
    assert found["monotone_share"] == pytest.approx((np.diff(each, axis=0) <= 0).all(0).mean())


def test_a_falling_trajectory_is_monotone() -> None:
    model = samples.mlp(num_outputs=1)
    with torch.no_grad():  # every block brings the output a constant step closer to 1
        for block in model.blocks:
            block.fc2.weight.zero_()
            block.fc2.bias.copy_(0.1 * model.head.weight[0] / model.head.weight[0].square().sum())
        model.embed.weight.zero_()
        model.embed.bias.zero_()
        model.head.bias.zero_()
    data = {"inputs": torch.zeros(5, 2), "labels": torch.ones(5)}
    t = ed.trace(model, data, ["monotonicity", "mse", "sup_error"], progress=False)
    assert t.result("monotonicity").meta["monotone"] is True
    assert t.result("monotonicity").arrays["monotone_share"] == 1
    np.testing.assert_allclose(t["mse"], (1 - 0.1 * np.arange(5)) ** 2, rtol=1e-5)
    np.testing.assert_allclose(t["sup_error"], 1 - 0.1 * np.arange(5), rtol=1e-5)


def test_perplexity_is_the_exponential_of_the_models_own_loss() -> None:
    model, data = samples.gpt2(), samples.sentences()
    t = ed.trace(model, data, ["loss", "perplexity", "next_token_accuracy"], batch_size=2)
    with torch.no_grad():
        own = float(model(**data).loss)
    assert t["loss"][-1] == pytest.approx(own, rel=1e-5)
    assert t["perplexity"][-1] == pytest.approx(np.exp(own), rel=1e-5)


def test_a_language_model_without_labels_predicts_its_own_tokens() -> None:
    model, data = samples.gpt2(), samples.sentences()
    bare = {key: data[key] for key in ("input_ids", "attention_mask")}
    names = ["loss", "next_token_accuracy"]
    a, b = (ed.trace(model, d, names, progress=False) for d in (data, bare))
    np.testing.assert_allclose(a["loss"], b["loss"])
    z = samples.logits(model, bare)[:, :, :-1].argmax(-1)
    target = data["labels"][:, 1:].numpy()
    real = target != -100
    expected = [(row == target)[real].mean() for row in z]
    np.testing.assert_allclose(a["next_token_accuracy"], expected)


def test_a_masked_language_model_is_judged_on_masked_tokens_only() -> None:
    from tests.zoo import ENTRIES

    model, batch = ENTRIES["Bert-MaskedLM"].make()
    labels = torch.full_like(batch["input_ids"], -100)
    labels[0, 2], labels[1, 1], labels[2, 0] = 5, 6, 7
    t = ed.trace(model, {**batch, "labels": labels}, ["loss", "accuracy"], batch_size=2)
    with torch.no_grad():
        own = float(model(**batch, labels=labels).loss)
    assert t["loss"][-1] == pytest.approx(own, rel=1e-5)
    assert t.rows == 3


def test_regression_errors_agree_with_numpy() -> None:
    model, data = samples.mlp(num_outputs=2), samples.points()
    t = ed.trace(model, data, batch_size=7, progress=False)
    e = samples.logits(model, data) - data["labels"].double().numpy()
    np.testing.assert_allclose(t["mse"], (e**2).mean((1, 2)), rtol=1e-5)
    np.testing.assert_allclose(t["mae"], np.abs(e).mean((1, 2)), rtol=1e-5)
    np.testing.assert_allclose(t["sup_error"], np.linalg.norm(e, axis=-1).max(1), rtol=1e-5)


def test_many_outputs_in_chunks_give_what_few_give_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from everydepth.tracing import observation
    from everydepth.tracing.metrics import contributions

    model, data = samples.gpt2(), samples.sentences()
    names = [n for n in ed.trace(model, data) if n not in ("cos", "cka")] + ["branch_contributions"]
    whole = ed.trace(model, data, names, progress=False)
    for module in (predictions, observation, contributions):
        monkeypatch.setattr(module, "LOGIT_BYTES", 4 * 40 * 5)  # five rows at a time
    chunked = ed.trace(model, data, names, progress=False)
    for name, result in whole.results.items():
        for key, array in result.arrays.items():
            np.testing.assert_allclose(
                np.ma.filled(array, 0),
                np.ma.filled(chunked.results[name].arrays[key], 0),
                atol=1e-5,
                rtol=1e-5,
            )


@pytest.mark.parametrize("classes", [2, 3])
def test_f1_agrees_with_scikit_learn(classes: int) -> None:
    model = samples.mlp(regression=False, num_outputs=classes)
    data = samples.points(60, 1)
    data["labels"] = (torch.arange(60) // 7) % classes
    t = ed.trace(model, data, ["f1"], batch_size=11, progress=False)
    with torch.no_grad():
        states = ed.as_stream(model).observe(data)
        tops = [states.logits(depth).argmax(-1).numpy() for depth in range(len(states))]
    how = "binary" if classes == 2 else "macro"
    expected = [f1_score(data["labels"].numpy(), top, average=how) for top in tops]
    np.testing.assert_allclose(t["f1"], expected, atol=1e-9)
