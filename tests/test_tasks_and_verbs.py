"""Every task with every verb: what plain loops in float64 say, or an error that says what to do."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.tasks import CASES, WITH_CLASSES, Asked, Case, case
from torch import Tensor

import everydepth as ed
from everydepth.errors import EveryDepthError, LabelError, SettingError, UnsupportedModelError
from everydepth.exits.calibrate import NotCertifiedWarning
from everydepth.growth.losses import mean_loss
from everydepth.stream import Targets

TIMES = 4
"""The rows of a case are repeated: growth needs 8. Means stay what they were."""


def repeated(name: str) -> Case:
    one = case(name)
    batch = {k: torch.cat([v] * TIMES) for k, v in one.batch.items()}
    size = len(next(iter(one.batch.values())))
    asked = [replace(a, sample=a.sample + size * i) for i in range(TIMES) for a in one.asked]
    return replace(one, batch=batch, asked=asked)


@torch.no_grad()
def readouts(one: Case) -> list[Tensor]:
    """The prediction at depths 0..L."""
    states = ed.as_stream(one.model, **one.options).observe(one.batch)
    return [states.logits(depth) for depth in range(len(states))]


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(
        np.asarray(found, dtype=float), np.asarray(expected, dtype=float), rtol=2e-5, atol=1e-9
    )


# -- the verbs: each asks, and compares with plain loops ------------------------------------------


def trained(one: Case) -> None:
    net = ed.EveryDepth(copy.deepcopy(one.model), ed.end_to_end(), **one.options)
    done = ed.fit(net, one.batch, one.batch, steps=1, batch_size=99, lr=1e-12, progress=False)
    expected = [one.mean_loss(z) for z in readouts(one)[1:]]
    close(done.valid["loss"], expected)


def traced(one: Case) -> None:
    stream = ed.as_stream(one.model, **one.options)
    name = "mse" if stream.task == "regression" else "loss"
    t = ed.trace(stream, one.batch, [name], progress=False)
    close(t[name], [one.mean_loss(z) for z in readouts(one)])


def traced_gradients(one: Case) -> None:
    stream = ed.as_stream(one.model, **one.options)
    t = ed.trace(stream, one.batch, ["gradient_norm"], progress=False)
    states = stream.observe(one.batch)
    z, last = states.logits(stream.depth), states.h[-1]
    norms: list[float] = []
    for sample in sorted({a.sample for a in one.asked}):
        own = [a for a in one.asked if a.sample == sample]
        loss = torch.stack([a.differentiable(z) for a in own]).mean()
        norms.append(float(torch.autograd.grad(loss, last, retain_graph=True)[0].norm()))
    close(t["gradient_norm"][-1], np.mean(norms))


def profiled(one: Case) -> None:
    found = ed.profile(one.model, one.batch, repeats=1, progress=False, **one.options)
    expected: list[float] = []
    for z in readouts(one)[1:]:
        if found.metric == "accuracy":
            expected.append(one.accuracy(z))
        elif found.metric == "perplexity":
            expected.append(float(np.exp(one.mean_loss(z))))
        elif found.metric == "mse":
            expected.append(one.mean_loss(z))
        else:
            last = readouts(one)[-1].flatten(1)
            gap = (z.flatten(1) - last).norm(dim=1) / last.norm(dim=1)
            expected.append(float(gap.mean()))
    close(found["quality"], expected)


def calibrated(one: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotCertifiedWarning)  # a dozen rows promise nothing
        how: dict[str, Any] = {"risk": 0.5, "against": "labels", "progress": False}
        policy = ed.calibrate(one.model, one.batch, **how, **one.options)
    assert policy.certificate is not None
    assert policy.certificate.samples == len(one.asked)


def evaluated(one: Case) -> None:
    policy = ed.Confidence(threshold=math.inf)  # nobody leaves early
    found = ed.evaluate(one.model, one.batch, policy, progress=False, **one.options)
    close([found.accuracy, found.accuracy_full], [one.accuracy(readouts(one)[-1])] * 2)


def ablated(one: Case) -> None:
    found = ed.ablate(one.model, one.batch, layers=1, c=1.0, progress=False, **one.options)
    if one.asked:
        close(found.untouched["loss"], [one.mean_loss(readouts(one)[-1])])
    else:
        assert "loss" not in found.untouched
        close(found.untouched["agreement"], [1.0])


def studied(one: Case) -> None:
    rows = sorted({a.sample for a in one.asked})
    wrong = rows[:2] or [0]
    found = ed.gradient_study(
        one.model, one.batch, one.batch, flipped=wrong, progress=False, **one.options
    )
    z = readouts(one)[-1]
    each = [np.mean([a.loss(z) for a in one.asked if a.sample == row]) for row in rows]
    close(found.learning.loss, each)
    close(found.memorization.loss, each[:2])


def memorized(one: Case) -> None:
    found = ed.memorization(one.model, one.batch, flipped=[0], progress=False, **one.options)
    rows = sorted({a.sample for a in one.asked})
    z = readouts(one)
    hits = [[all(a.hit(y) for a in one.asked if a.sample == row) for row in rows] for y in z]
    close(found.train_accuracy, np.mean(hits[-1]))
    close(found["by_depth"], [float(at[0]) for at in hits])


def audited(one: Case) -> None:
    found = ed.audit(one.model, one.batch, progress=False, **one.options)
    logs = [[-a.loss(z) for a in one.asked] for z in readouts(one)[1:]]
    close(found.score, -np.mean(logs, 0))


def scored(one: Case) -> None:
    found = ed.growth.score(one.model, one.batch, progress=False, **one.options)
    close(found.loss, one.mean_loss(readouts(one)[-1]))


def grown(one: Case) -> None:
    found = ed.grow(
        one.model, one.batch, one.batch, steps=1, rounds=1, batch_size=8, progress=False
    )
    depth = ed.as_stream(one.model).depth
    assert found.depth in (depth, depth + 1)
    close(mean_loss(one.model, one.batch), one.mean_loss(readouts(one)[-1]))


VERBS: Mapping[str, Callable[[Case], None]] = {
    verb.__name__: verb
    for verb in (
        trained,
        traced,
        traced_gradients,
        profiled,
        calibrated,
        evaluated,
        ablated,
        studied,
        memorized,
        audited,
        scored,
        grown,
    )
}

# -- what is refused, and how ---------------------------------------------------------------------

NO_LOSS = (SettingError, r"for which there is no built-in loss; pass criterion=f\(prediction")
OTHER_METRIC = (SettingError, "Drop them")
ONE_CLASS = (UnsupportedModelError, "predicts a class per sample")
EVERY_TOKEN = (UnsupportedModelError, "predicts a class per token")
NOT_CLASSES = (SettingError, "needs a class or a token to predict")
NO_BRANCHES = (UnsupportedModelError, "without its branches|branches")
EVERY_ROW = (LabelError, "needs one class for every row")
NOT_AUDITED = (SettingError, "an audit needs class labels")
NO_INSERTION = (UnsupportedModelError, "no block can be inserted")

REFUSED: dict[tuple[str, str], tuple[type[EveryDepthError], str]] = {
    **{(verb, task): NO_LOSS for verb in ("trained", "studied", "scored", "grown")
       for task in ("detection", "embedding")},
    # Blocks that were only named have no known branches to silence.
    ("scored", "token labels"): NO_INSERTION,
    **{(verb, task): OTHER_METRIC for verb in ("traced", "traced_gradients")
       for task in ("detection", "embedding")},
    **{(verb, task): ONE_CLASS for verb in ("calibrated", "evaluated")
       for task in CASES if task not in ("classification", "soft labels", "token labels")},
    **{(verb, "token labels"): EVERY_TOKEN for verb in ("calibrated", "evaluated")},
    ("ablated", "embedding"): (SettingError, "produces embeddings"),
    ("ablated", "token labels"): NO_BRANCHES,
    ("studied", "token labels"): NO_BRANCHES,
    **{("memorized", task): NOT_CLASSES for task in CASES if task not in WITH_CLASSES},
    **{("audited", task): NOT_AUDITED for task in CASES
       if task not in ("classification", "soft labels", "token labels")},
    # The classification of this table has a row without a label.
    **{("audited", task): EVERY_ROW for task in ("classification", "soft labels", "token labels")},
}  # fmt: skip


@pytest.mark.parametrize("task", CASES)
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_answers_rightly_or_says_why_not(verb: str, task: str) -> None:
    one = repeated(task)
    refused = REFUSED.get((verb, task))
    if refused is None:
        VERBS[verb](one)
        return
    kind, message = refused
    with pytest.raises(kind, match=message):
        VERBS[verb](one)


def test_an_audit_of_labeled_rows_is_that_of_plain_loops() -> None:
    one = repeated("classification")
    labels = one.batch["labels"].clamp(min=0)
    asked = [Asked(i, None, int(label)) for i, label in enumerate(labels)]
    audited(replace(one, batch={**one.batch, "labels": labels}, asked=asked))


# -- decisions that hold for every verb -----------------------------------------------------------

WITHOUT_LABELS = ("profiled", "evaluated", "ablated")
MEASURING = [verb for verb in VERBS if verb not in ("trained", "scored", "grown")]


@pytest.mark.parametrize("verb", VERBS)
def test_weights_of_a_batch_are_used_or_refused(verb: str) -> None:
    one = repeated("classification")
    weights = torch.rand(len(one.batch["labels"]), dtype=torch.float64)
    one = replace(one, batch={**one.batch, "loss_weights": weights})
    if verb in MEASURING:
        with pytest.raises(LabelError, match="'loss_weights', but here all rows count equally"):
            VERBS[verb](one)
        return
    stream, z = ed.as_stream(one.model), readouts(replace(one, batch={
        k: v for k, v in one.batch.items() if k != "loss_weights"
    }))[-1]  # fmt: skip
    own = [float(weights[a.sample]) for a in one.asked]
    pairs = zip(own, one.asked, strict=True)
    expected = sum(w * a.loss(z) for w, a in pairs) / sum(own)
    if verb == "trained":
        net = ed.EveryDepth(one.model, ed.end_to_end())
        done = ed.fit(net, one.batch, one.batch, steps=1, lr=1e-12, progress=False)
        close(done.valid["loss"][-1], expected)
    elif verb == "scored":
        close(ed.growth.score(one.model, one.batch, progress=False).loss, expected)
    else:
        close(mean_loss(stream, one.batch), expected)


@pytest.mark.parametrize("verb", [v for v in VERBS if v not in WITHOUT_LABELS])
def test_data_without_labels_is_named_by_every_verb_that_needs_them(verb: str) -> None:
    one = repeated("classification")
    batch = {key: value for key, value in one.batch.items() if key != "labels"}
    with pytest.raises(LabelError, match=r"labels"):
        VERBS[verb](replace(one, batch=batch))


WRONG = {
    "a column": (lambda y: y[:, None], r"shape \(\d+, 1\), but .* \(labels.flatten\(\)\)"),
    "numbers": (lambda y: y.double(), "one of 10 classes"),
    "too few": (lambda y: y[:5], "labels have shape .5,., but the batch has 12 rows"),
    "no such class": (lambda y: y + 20, "but the head of ViT.* has 10 classes"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("verb", VERBS)
def test_labels_that_cannot_be_right_get_one_message_from_every_verb(verb: str, wrong: str) -> None:
    one = repeated("classification")
    change, message = WRONG[wrong]
    labels = change(one.batch["labels"].clamp(min=0))
    with pytest.raises(LabelError, match=message):
        VERBS[verb](replace(one, batch={**one.batch, "labels": labels}))


# -- a criterion of one's own ---------------------------------------------------------------------


@pytest.mark.parametrize("task", ["detection", "embedding"])
def test_a_criterion_serves_training_and_growth_alike(task: str) -> None:
    one = repeated(task)
    stream = ed.as_stream(one.model)

    def criterion(z: Tensor, labels: Tensor, context: Mapping[str, Any]) -> Tensor:
        loss = (z.flatten(1) - context["pixel_values"].mean((1, 2, 3))[:, None]).square().mean(1)
        if task == "detection":
            loss = loss + (context["pred_boxes"] - labels).abs().mean((1, 2))
        return loss

    with torch.no_grad():
        states = stream.observe(one.batch)
        targets = Targets.of(stream, one.batch, criterion=criterion)
        extras = stream.extras(states.h[-1], stream.depth, states.batch)
        expected = float(targets.losses(states.logits(stream.depth), extras).mean())
    net = ed.EveryDepth(copy.deepcopy(one.model), ed.end_to_end(), criterion=criterion)
    done = ed.fit(net, one.batch, one.batch, steps=1, lr=1e-12, progress=False)
    close(done.valid["loss"][-1], expected)
    close(mean_loss(one.model, one.batch, criterion=criterion), expected)
    if task == "embedding":  # DETR norms its sums, so that no block can be inserted
        found = ed.growth.score(one.model, one.batch, criterion=criterion, progress=False)
        close(found.loss, expected)
        jump = ed.growth.jumpboard(one.model, one.batch, scored=found, criterion=criterion)
        assert jump.margin >= 0
