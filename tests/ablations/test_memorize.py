"""Memorization: shares by definition, honesty about 100 %, the generative variant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.zoo import CAUSAL, ENTRIES
from torch import Tensor

import everydepth as ed
from everydepth.ablations import Audit, label_prompts
from everydepth.ablations.memorize import wilson
from everydepth.data import Images, NoisyLabels, flip_labels
from everydepth.errors import BatchError, DataError, LabelError, SettingError


def images(rows: int = 12) -> Images:
    pixels, labels = torch.randn(rows, 3, 32, 32), torch.arange(rows) % 10
    return Images(pixels, labels, classes=tuple("0123456789"))


@torch.no_grad()
def test_memorization_is_the_share_of_flipped_samples_predicted_as_their_wrong_label() -> None:
    model, _ = ENTRIES["ViT"].make()
    data = images()
    guess = model(pixel_values=data.pixel_values).logits.argmax(-1)
    # Rows 0 to 5 are flipped: four of them to what the model says, two to something else.
    labels = data.labels.clone()
    labels[:4], labels[4:6] = guess[:4], (guess[4:6] + 1) % 10
    noise = NoisyLabels(labels=labels, flipped=torch.arange(6), original=data.labels)
    found = ed.memorization(model, replace(data, labels=labels), data, flipped=noise, batch_size=5)
    assert found.memorization == pytest.approx(4 / 6)
    assert found.flipped == 6
    assert found.train_accuracy == pytest.approx(float((guess == labels).float().mean()))
    assert found.test_accuracy == pytest.approx(float((guess == data.labels).float().mean()))
    assert found.recovered == pytest.approx(float((guess == data.labels)[:6].float().mean()))
    assert found["by_depth"][-1] == found.memorization
    assert len(found["by_depth"]) == 5
    assert not found.reached
    assert "100 % not reached" in str(found)
    as_rows = ed.memorization(model, replace(data, labels=labels), flipped=[0, 1, 2, 3, 4, 5])
    assert as_rows.memorization == found.memorization
    assert as_rows.recovered is None
    assert as_rows.test_accuracy is None


@torch.no_grad()
def test_a_model_that_fits_every_label_has_reached_it() -> None:
    model, _ = ENTRIES["ViT"].make()
    data = images()
    fitted = replace(data, labels=model(pixel_values=data.pixel_values).logits.argmax(-1))
    found = ed.memorization(model, fitted, flipped=[3])
    assert found.reached
    assert found.memorization == 1.0
    assert "not reached" not in str(found)


def test_wilsons_interval_is_the_textbook_one() -> None:
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)


@torch.no_grad()
def test_a_language_model_memorizes_what_greedy_decoding_writes() -> None:
    """One pass over the label's tokens says the same as decoding token by token."""
    model, _ = CAUSAL["GPT2-CausalLM-left"].make()
    torch.manual_seed(3)
    prompts = torch.randint(3, 60, (8, 5))
    written = prompts
    for _ in range(2):
        written = torch.cat([written, model(input_ids=written).logits[:, -1:].argmax(-1)], 1)
    ids = written.clone()
    ids[4:, -1] = (ids[4:, -1] + 1) % 60  # the last token of these labels is another
    labels = ids.clone()
    labels[:, :5] = -100
    found = ed.memorization(model, {"input_ids": ids, "labels": labels}, flipped=[0, 1, 4, 5])
    assert found.memorization == 0.5


def words(texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
    return {"input_ids": [[sum(map(ord, w)) % 50 + 5 for w in t.split()] for t in texts]}


def test_a_label_prompt_ends_in_the_label_and_keeps_the_prompt() -> None:
    texts = ["one two three four five six seven eight nine ten", "one"]
    rows = label_prompts(texts, [0, 1], ["red", "deep blue"], words, 9)
    red, blue = words([" red", " deep blue"])["input_ids"]
    prompt = words([" The topic is about"])["input_ids"][0]
    first, second = rows.input_ids
    assert first.tolist() == [*words([texts[0]])["input_ids"][0][:3], *prompt, *red]
    assert second.tolist()[-7:] == [*words(["one"])["input_ids"][0], *prompt, *blue]
    labels: Any = rows.labels
    assert labels[0].tolist() == [-100] * 7 + red
    assert labels[1].tolist()[-2:] == blue
    assert (labels[1][:-2] == -100).all()
    mask: Any = rows.attention_mask
    assert mask.sum(1).tolist() == [8, 7]
    everything: Any = label_prompts(texts, [0, 1], ["red", "blue"], words, 9, loss_on="all").labels
    assert (everything == -100).sum() == (len(everything[0]) - 6)


def test_bad_input_of_prompts_is_named() -> None:
    with pytest.raises(DataError, match="2 texts and 1 labels"):
        label_prompts(["a", "b"], [0], ["x"], words, 9)
    with pytest.raises(DataError, match="labels 3 to 3, but there are 2 class names"):
        label_prompts(["a"], [3], ["x", "y"], words, 9)
    with pytest.raises(DataError, match="same tokens"):
        label_prompts(["a"], [0], ["x", "x"], words, 9)
    with pytest.raises(DataError, match="leaves no room for a text"):
        label_prompts(["a"], [0], ["x", "y"], words, 5)


@pytest.mark.parametrize("form", ["tensor", "list", "array", "numpy numbers"])
def test_a_boolean_mask_selects_the_flipped_rows(form: str) -> None:
    model, _ = ENTRIES["ViT"].make()
    data, rows = images(), [0, 1, 5]
    mask = torch.zeros(12, dtype=torch.bool)
    mask[rows] = True
    forms: dict[str, Any] = {
        "tensor": mask,
        "list": mask.tolist(),
        "array": mask.numpy(),
        "numpy numbers": np.array(rows),
    }
    asked = {"flipped": forms[form], "progress": False}
    expected = ed.memorization(model, data, flipped=rows, progress=False)
    assert (
        ed.memorization(model, data, **asked).to_json()["results"]
        == (expected.to_json()["results"])
    )
    assert len(ed.gradient_study(model, data, data, **asked).memorization.loss) == 3


def test_bad_input_of_memorization_is_named() -> None:
    model, _ = ENTRIES["ViT"].make()
    data = images()
    with pytest.raises(SettingError, match=r"pass flipped=, the outcome of everydepth.data.flip"):
        ed.memorization(model, data)
    with pytest.raises(SettingError, match="flipped has 0 rows"):
        ed.memorization(model, data, flipped=[])
    with pytest.raises(BatchError, match="row 99 is requested, but the data has 12 rows"):
        ed.memorization(model, data, flipped=[99])
    with pytest.raises(BatchError, match=r"flipped is float32 of shape \(2,\); "):
        ed.memorization(model, data, flipped=torch.tensor([1.0, 2.7]))
    with pytest.raises(BatchError, match="a mask of 3 rows, but the data has 12; give one boolean"):
        ed.memorization(model, data, flipped=[True, False, True])
    with pytest.raises(LabelError, match=r"measuring ViT.* needs 'labels'"):
        ed.memorization(model, {"pixel_values": data.pixel_values}, flipped=[0])
    regression, batch = ENTRIES["ResidualMLP-norm0-skips1-regression1"].make()
    with pytest.raises(SettingError, match="needs a class or a token to predict"):
        ed.memorization(regression, batch, flipped=[0])
    with pytest.raises(DataError, match="must be from 0 to 1"):
        flip_labels(data.labels, 1.5)
    with pytest.raises(DataError, match="flips none"):
        flip_labels(data.labels, 0.05, of_class=3)


# -- audit ----------------------------------------------------------------------------------------


class Blobs:
    """Ten Gaussian blobs, one a class, some labels flipped; a network reads the blob off them."""

    def __init__(self, rows: int = 400, noise: float = 0.15, spread: float = 0.6) -> None:
        generator = torch.Generator().manual_seed(0)
        truth = torch.arange(rows) % 5
        centers = torch.randn(5, 2, generator=generator) * 2
        self.inputs = centers[truth] + spread * torch.randn(rows, 2, generator=generator)
        self.noise = flip_labels(truth, noise, seed=1)
        self.batch: dict[str, Tensor] = {"inputs": self.inputs, "labels": self.noise.labels}

    def trained(self, rows: Tensor) -> torch.nn.Module:
        from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig

        torch.manual_seed(0)
        model = ResidualMLP(
            ResidualMLPConfig(num_outputs=5, num_hidden_layers=3, hidden_size=16, regression=False)
        )
        net = ed.EveryDepth(model, ed.lpa())
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        part = {k: v[rows] for k, v in self.batch.items()}
        for _ in range(60):
            loss = net(**part).loss
            assert loss is not None
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.eval()

    def precision(self, score: np.ndarray) -> float:
        from sklearn.metrics import average_precision_score

        truth = np.zeros(len(score))
        truth[self.noise.flipped] = 1
        return float(average_precision_score(truth, score))


@pytest.fixture(scope="module")
def audited() -> tuple[Blobs, Audit, list[torch.nn.Module], Tensor]:
    from everydepth.ablations import folds

    blobs = Blobs()
    where = folds(blobs.noise.labels, 2)
    models = [blobs.trained(where != k) for k in range(2)]
    return blobs, ed.audit(models, blobs.batch, folds=where, progress=False), models, where


def test_an_audit_finds_the_flipped_labels(audited: Any) -> None:
    blobs, found, _, _ = audited
    assert found.calibrated
    assert blobs.precision(found.score) > 0.8  # 0.15 by chance
    first, _, third = found.table(top=3).column("score")
    assert first >= third
    assert set(found.suspects(0.5)) <= set(range(400))


def test_its_scores_are_probabilities(audited: Any) -> None:
    blobs, found, _, _ = audited
    truth = np.zeros(400)
    truth[blobs.noise.flipped] = 1
    assert found.noise == pytest.approx(0.15, abs=0.05)
    assert found.score.mean() == pytest.approx(0.15, abs=0.05)
    assert np.mean((found.score - truth) ** 2) < 0.5 * 0.15 * 0.85  # half of a constant's


def test_each_sample_is_judged_by_the_model_that_did_not_see_it(audited: Any) -> None:
    blobs, found, models, where = audited
    with torch.no_grad():
        for k, model in enumerate(models):
            rows = (where == k).nonzero().flatten()
            z = model(inputs=blobs.inputs[rows]).logits
            given = blobs.noise.labels[rows]
            own = z.gather(1, given[:, None])[:, 0]
            other = z.scatter(1, given[:, None], -torch.inf).amax(1)
            np.testing.assert_allclose(
                found.signals["last_margin"][rows.numpy()], (own - other).numpy(), rtol=1e-4
            )


def test_signals_follow_their_definitions(audited: Any) -> None:
    blobs, found, models, where = audited
    row = int((where == 1).nonzero()[0])
    states = ed.as_stream(models[1]).observe({"inputs": blobs.inputs[row : row + 1]})
    label = int(blobs.noise.labels[row])
    tops = [int(states.logits(d).argmax()) for d in range(4)]
    wrong = [d for d in range(4) if tops[d] != label]
    assert found.signals["prediction_depth"][row] == (wrong[-1] + 1 if wrong else 0)
    moving = [d for d in range(4) if tops[d] != tops[-1]]
    assert found.signals["saturation"][row] == (moving[-1] + 1 if moving else 0)
    p = states.logits(3).softmax(-1).detach().double()[0]
    p[label] -= 1
    weight = models[1].head.weight.detach().double()
    assert found.signals["error"][row] == pytest.approx(float(p.norm()), rel=1e-4)
    # One head a fold: their mean stands for both.
    assert found.signals["gradient_norm"][row] == pytest.approx(float((p @ weight).norm()), rel=0.3)


def test_without_held_out_predictions_the_score_is_an_order_only() -> None:
    blobs = Blobs(rows=100)
    model = blobs.trained(torch.ones(100, dtype=torch.bool))
    found = ed.audit(model, blobs.batch)
    assert not found.calibrated
    assert found.noise is None
    assert "not calibrated" in found.note
    assert blobs.precision(found.score) > 0.5
    with pytest.raises(SettingError, match="a threshold on its score is meaningless"):
        found.suspects()


def test_folds_spread_every_class() -> None:
    from everydepth.ablations import folds

    labels = torch.arange(60) % 4
    where = folds(labels, 3)
    for k in range(3):
        assert torch.bincount(labels[where == k]).tolist() == [5, 5, 5, 5]
    with pytest.raises(DataError, match=r"class 1 has 2 sample\(s\), too few for 3 folds"):
        folds([0, 0, 0, 1, 1], 3)
    with pytest.raises(SettingError, match=r"folds\(count=1\); use a whole number of 2 or more"):
        folds(labels, 1)


def test_bad_input_of_an_audit_is_named(audited: Any) -> None:
    blobs, _, models, where = audited
    with pytest.raises(SettingError, match="give both or neither"):
        ed.audit(models, blobs.batch)
    with pytest.raises(SettingError, match="2 models, but folds are"):
        ed.audit(models, blobs.batch, folds=where + 1)
    with pytest.raises(BatchError, match=r"row 40\d is requested, but the data has 400 rows"):
        ed.audit(models, blobs.batch, folds=torch.cat([where, where[:10]]))
    with pytest.raises(BatchError, match="folds is float32"):
        ed.audit(models, blobs.batch, folds=where + 0.5)
    with pytest.raises(BatchError, match="390 fold numbers, but the data has 400 rows"):
        ed.audit(models, blobs.batch, folds=where[:390])
    with pytest.raises(LabelError, match="measuring ResidualMLP needs 'labels'"):
        ed.audit(models[0], {"inputs": blobs.inputs})
    causal, batch = CAUSAL["GPT2-CausalLM-left"].make()
    with pytest.raises(SettingError, match="an audit needs class labels"):
        ed.audit(causal, batch)
