"""What is asked of a model, for every task, against plain loops in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers as hf
from tests.helpers.tasks import PER_TOKEN, WITH_A_LOSS, WITH_CLASSES, Case, case
from tests.zoo import ENTRIES, ROWS, TEXT, TOKENS
from torch import Tensor, nn

import everydepth as ed
from everydepth.errors import LabelError, SettingError
from everydepth.stream import ResidualStream, States, Targets, has_labels, with_labels
from everydepth.stream.given import PaddingWarning


def observed(one: Case) -> tuple[ResidualStream, States]:
    stream = ed.as_stream(one.model, **one.options)
    with torch.no_grad():
        return stream, stream.observe(one.batch)


@pytest.fixture(params=WITH_A_LOSS)
def task(request: pytest.FixtureRequest) -> Case:
    return case(request.param)


# -- rows, losses and hits ------------------------------------------------------------------------


def test_the_loss_of_every_row_is_that_of_plain_loops(task: Case) -> None:
    stream, states = observed(task)
    targets = Targets.of(stream, task.batch)
    z = states.logits(stream.depth)
    expected = torch.tensor([one.loss(z) for one in task.asked], dtype=torch.float64)
    losses = targets.losses(targets.pick(z))
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(targets.loss(targets.pick(z)), expected.mean(), rtol=1e-10, atol=0)
    assert targets.sample.tolist() == [one.sample for one in task.asked]
    assert len(targets) == len(task.asked)


def test_the_prediction_of_the_rows_is_the_same_at_every_depth(task: Case) -> None:
    stream, states = observed(task)
    targets = Targets.of(stream, task.batch)
    for depth in range(stream.depth + 1):
        whole = targets.pick(states.logits(depth))
        torch.testing.assert_close(targets.predicted(states, depth), whole, rtol=1e-9, atol=1e-12)


def test_the_loss_of_a_sample_is_the_mean_over_its_rows(task: Case) -> None:
    stream, states = observed(task)
    targets = Targets.of(stream, task.batch)
    z = states.logits(stream.depth)
    found = targets.sample_losses(targets.pick(z)).tolist()
    for sample, value in enumerate(found):
        own = [one.loss(z) for one in task.asked if one.sample == sample]
        assert value == pytest.approx(sum(own) / max(len(own), 1), rel=1e-10)
        assert bool(targets.known[sample]) == bool(own)


@pytest.mark.parametrize("name", WITH_CLASSES)
def test_a_hit_is_the_most_likely_class_and_of_a_sample_all_of_them(name: str) -> None:
    one = case(name)
    stream, states = observed(one)
    z = states.logits(stream.depth).clone()
    for right in one.asked[::2]:  # an untrained model hits nothing
        best = (
            right.label
            if isinstance(right.label, int)
            else max(range(len(right.label)), key=right.label.__getitem__)
        )
        right.of(z)[best] += 1e3
    targets = Targets.of(stream, one.batch)
    expected = [a.hit(z) for a in one.asked]
    assert True in expected
    assert targets.hits(targets.pick(z)).tolist() == expected
    samples = [[a.hit(z) for a in one.asked if a.sample == i] for i in range(ROWS)]
    found = targets.sample_hits(targets.pick(z)).tolist()
    assert found == [bool(own) and all(own) for own in samples]


def test_every_row_that_is_not_padding_has_its_label_or_none(task: Case) -> None:
    stream, states = observed(task)
    z = states.logits(stream.depth)
    every, only = Targets.every(stream, task.batch, z), Targets.of(stream, task.batch)
    assert len(every.pick(z)) == len(every) == len(every.labels)
    assert torch.equal(every.labels[every.labeled], only.labels)
    assert torch.equal(every.pick(z)[every.labeled], only.pick(z))
    if z.ndim == 3 and stream.task != "masked_lm":
        assert len(every) == int(task.batch["attention_mask"].sum())


def test_without_labels_all_but_padding_counts_and_a_loss_is_refused() -> None:
    one = case("token labels")
    batch = {key: value for key, value in one.batch.items() if key != "labels"}
    stream, states = observed(one)
    every = Targets.every(stream, batch, states.logits(4))
    assert every.labels is None
    assert not every.labeled.any()
    assert len(every) == int(batch["attention_mask"].sum())
    with pytest.raises(LabelError, match=r"has keys \['att.* measuring Bert.* needs 'labels'"):
        Targets.of(stream, batch)


# -- each decision --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PER_TOKEN)
def test_padding_never_counts_even_if_labeled(name: str) -> None:
    task = case(name)
    mask = task.batch["attention_mask"]
    stream, _ = observed(task)
    changed = {**with_labels(stream, task.batch)}
    changed["labels"] = torch.where(mask == 0, torch.ones_like(mask), changed["labels"])
    assert torch.equal(Targets.of(stream, changed).labels, Targets.of(stream, task.batch).labels)


@pytest.mark.parametrize("name", ["Llama-tied", "GPTNeoX-serial"])
def test_padding_on_either_side_gives_the_same_losses(name: str) -> None:
    torch.manual_seed(0)
    model = ENTRIES[f"{name}-CausalLM-left"].make(torch.float64)[0]
    stream = ed.as_stream(model)
    found: list[Tensor] = []
    words = torch.randint(3, 60, (1, 4))
    for padding in ((3, 0), (0, 3)):
        ids = torch.nn.functional.pad(words, padding, value=1)
        mask = torch.nn.functional.pad(torch.ones_like(words), padding)
        batch = {"input_ids": ids, "attention_mask": mask}
        targets, states = Targets.of(stream, batch), stream.observe(batch)
        found.append(targets.losses(targets.predicted(states, stream.depth)))
    assert len(found[0]) == 3
    # Rotary tables are float32 in every model.
    torch.testing.assert_close(*found, rtol=1e-7, atol=0)


def test_text_predicts_its_own_tokens_and_the_last_position_nothing() -> None:
    one = case("unlabeled text")
    stream, _ = observed(one)
    assert has_labels(stream, one.batch)
    own = {**one.batch, "labels": one.batch["input_ids"]}
    assert torch.equal(Targets.of(stream, one.batch).labels, Targets.of(stream, own).labels)
    ids = one.batch["input_ids"].clamp(min=2)  # no padding
    rows = Targets.of(stream, {"input_ids": ids}).rows
    assert rows is not None
    assert not (rows % TOKENS == TOKENS - 1).any()
    assert len(rows) == ROWS * (TOKENS - 1)


def test_weights_of_the_batch_weigh_the_losses(task: Case) -> None:
    stream, states = observed(task)
    labels = with_labels(stream, task.batch)["labels"]
    shape = labels.shape if not labels.is_floating_point() else labels.shape[:1]
    weights = torch.rand(shape, dtype=torch.float64)
    batch = {**task.batch, "loss_weights": weights}
    z = states.logits(stream.depth)
    shift = int(stream.task == "causal_lm")
    own = [
        float(weights[a.sample] if a.place is None else weights[a.sample, a.place + shift])
        for a in task.asked
    ]
    losses = [a.loss(z) for a in task.asked]
    expected = sum(w * x for w, x in zip(own, losses, strict=True)) / sum(own)
    targets = Targets.of(stream, batch)
    assert float(targets.loss(targets.pick(z))) == pytest.approx(expected, rel=1e-6)
    assert float(targets.amount) == pytest.approx(sum(own), rel=1e-6)
    for refuses in (
        lambda: Targets.of(stream, batch, weighted=False),
        lambda: Targets.every(stream, batch, z),
    ):
        with pytest.raises(LabelError, match="'loss_weights', but here all rows count equally"):
            refuses()


def test_class_weights_and_smoothing_are_those_of_torch() -> None:
    one = case("labeled text")
    stream, states = observed(one)
    classes = torch.rand(60, dtype=torch.float64)
    settings: dict[str, Any] = {"class_weights": classes, "label_smoothing": 0.1}
    targets = Targets.of(stream, one.batch, **settings)
    z = targets.pick(states.logits(stream.depth))
    expected = torch.nn.functional.cross_entropy(
        z, targets.labels, weight=classes, label_smoothing=0.1
    )
    torch.testing.assert_close(targets.loss(z), expected, rtol=1e-6, atol=0)
    assert not targets.can_be_chunked
    plain = Targets.of(stream, one.batch, class_weights=classes)
    assert plain.can_be_chunked
    torch.testing.assert_close(
        (
            torch.nn.functional.cross_entropy(z, plain.labels, reduction="none") * plain.class_scale
        ).sum(),
        plain.loss(z),
        rtol=1e-6,
        atol=0,
    )


def test_a_batch_in_which_nothing_is_asked_has_a_loss_of_zero() -> None:
    one = case("masked text")
    stream, states = observed(one)
    targets = Targets.of(stream, {**one.batch, "labels": torch.full((ROWS, TOKENS), -100)})
    z = targets.pick(states.logits(stream.depth))
    assert len(targets) == 0
    assert float(targets.loss(z)) == 0
    assert targets.sample_losses(z).tolist() == [0, 0, 0]
    assert not targets.known.any()


# -- a criterion of one's own ---------------------------------------------------------------------


def test_a_criterion_gets_prediction_labels_and_context_and_gives_a_number_a_row() -> None:
    one = case("detection")
    stream, states = observed(one)
    seen: dict[str, Any] = {}

    def criterion(z: Tensor, labels: Tensor, context: Mapping[str, Any]) -> Tensor:
        seen.update(context)
        return (context["pred_boxes"] - labels).abs().mean((1, 2))

    targets = Targets.of(stream, one.batch, criterion=criterion)
    extras = stream.extras(states.h[2], 2, states.batch)
    z = targets.predicted(states, 2)
    assert torch.equal(z, states.logits(2))
    losses = targets.losses(z, extras)
    expected = (extras["pred_boxes"] - one.batch["labels"]).abs().mean((1, 2))
    assert torch.equal(losses, expected)
    assert sorted(seen) == ["pixel_values", "pred_boxes"]
    torch.testing.assert_close(targets.loss(z, extras), expected.mean())
    assert torch.equal(targets.sample_losses(z, extras), expected)


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        (lambda z: z.mean(), r"\(\)"),
        (lambda z: z.mean((0, 1)), r"\(6,\)"),
        (lambda z: float(z.mean()), "float"),
    ],
)
def test_a_criterion_that_gives_anything_but_a_number_a_row_is_refused(
    given: Any, shape: str
) -> None:
    one = case("detection")
    stream, states = observed(one)
    targets = Targets.of(stream, one.batch, criterion=lambda z, _, __: given(z))
    with pytest.raises(
        SettingError, match=f"criterion returned shape {shape}, but there are 3 rows"
    ):
        targets.losses(states.logits(4))


@pytest.mark.parametrize("name", ["detection", "embedding"])
def test_a_task_without_a_loss_of_its_own_asks_for_a_criterion(name: str) -> None:
    one = case(name)
    stream, _ = observed(one)
    with pytest.raises(SettingError, match=rf"does {name}, for which .* pass criterion="):
        Targets.of(stream, one.batch)


def test_several_labels_a_sample_ask_for_a_criterion() -> None:
    config = hf.BertConfig(**TEXT, problem_type="multi_label_classification")
    stream = ed.as_stream(hf.BertForSequenceClassification(config))
    batch = ENTRIES["Bert-SequenceClassification"].feed()
    with pytest.raises(SettingError, match="does multi-label classification"):
        Targets.of(stream, {**batch, "labels": torch.ones(ROWS, 3)})


def test_several_labels_a_sample_are_not_measured_as_shares() -> None:
    config = hf.BertConfig(**TEXT, problem_type="multi_label_classification")
    model = hf.BertForSequenceClassification(config).eval()
    batch = ENTRIES["Bert-SequenceClassification"].feed()
    several = {**batch, "labels": torch.eye(config.num_labels)[:ROWS]}
    with pytest.raises(LabelError, match=r"needs labels of one class each, but .* is multi-label"):
        ed.trace(model, several, ["loss"], progress=False)
    assert ed.trace(model, several, ["cos"], progress=False)["cos"].ndim


def test_a_config_that_says_regression_has_numbers_to_be_met() -> None:
    config = hf.BertConfig(**TEXT, problem_type="regression")
    model = hf.BertForSequenceClassification(config).eval()
    batch = ENTRIES["Bert-SequenceClassification"].feed()
    numbers = {**batch, "labels": torch.randn(ROWS, config.num_labels)}
    assert ed.as_stream(model).task == "regression"
    with torch.no_grad():
        expected = model(**numbers).loss
        found = ed.EveryDepth(model, ed.end_to_end()).eval()(**numbers).loss
    torch.testing.assert_close(found, expected)


# -- labels that cannot be right ------------------------------------------------------------------

WRONG = [
    ("ViT", torch.zeros(3, 1, dtype=torch.long), r"shape \(3, 1\), but .* \(3,\) \(labels.flatten"),
    ("ViT", torch.zeros(2, dtype=torch.long), r"shape \(2,\), but the batch has 3 rows"),
    ("ViT", torch.zeros(3), r"float32, one per row, but .* one of 10 classes.*labels.long"),
    ("ViT", torch.tensor(3), r"shape \(\), but the batch has 3 rows"),
    ("ViT", torch.rand(3, 4), "labels have 4 numbers per row, predictions 10"),
    ("ViT", torch.tensor([0, 10, 1]), "label 10, but the head of ViT.* has 10 classes"),
    ("ViT", [0, 1, 2], "labels are list; pass a tensor"),
    ("ResidualMLP-norm1-skips1-regression1", torch.rand(3, 3), "3 numbers per row, predictions 2"),
    ("Bert-MaskedLM", torch.rand(3, 7, 60), r"floats of shape \(3, 7, 60\).*one class per token"),
    ("GPT2-CausalLM-left", torch.zeros(3, 5, dtype=torch.long), r"\(3, 5\), but .* \(3, 7\) rows"),
    ("GPT2-CausalLM-left", torch.zeros(3, dtype=torch.long), r"shape \(3,\), but .* \(3, 7\) rows"),
]


@pytest.mark.parametrize(("name", "labels", "message"), WRONG)
def test_labels_that_cannot_be_right_are_refused(name: str, labels: Any, message: str) -> None:
    model, batch = ENTRIES[name].make()
    stream = ed.as_stream(model)
    z = stream.observe(batch).logits(stream.depth)
    batch = {**batch, "labels": labels}

    def losses() -> Tensor:
        targets = Targets.of(stream, batch)
        return targets.losses(targets.pick(z))

    with pytest.raises(LabelError, match=message):
        losses()


def test_weights_of_another_shape_than_the_labels_are_refused() -> None:
    one = case("labeled text")
    stream, _ = observed(one)
    with pytest.raises(LabelError, match=r"loss_weights have shape \(3,\), labels \(3, 7\)"):
        Targets.of(stream, {**one.batch, "loss_weights": torch.ones(3)})


def test_whole_numbers_of_any_width_are_classes() -> None:
    one = case("classification")
    stream, states = observed(one)
    narrow = {**one.batch, "labels": one.batch["labels"].to(torch.int16)}
    targets, plain = Targets.of(stream, narrow), Targets.of(stream, one.batch)
    z = states.logits(4)
    assert torch.equal(targets.losses(targets.pick(z)), plain.losses(plain.pick(z)))


# -- padding without a mask -----------------------------------------------------------------------


def padded(model: nn.Module, count: int = 2, side: str = "right") -> dict[str, Tensor]:
    ids = torch.randint(3, 40, (3, 8), generator=torch.Generator().manual_seed(0))
    ids[1, slice(8 - count, None) if side == "right" else slice(0, count)] = (
        model.config.pad_token_id
    )
    return {"input_ids": ids}


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_without_a_mask_is_told(side: str) -> None:
    model = ENTRIES["Llama-tied-CausalLM-left"].make()[0]
    model.config.pad_token_id = 1
    stream, batch = ed.as_stream(model), padded(model, side=side)
    said = "1 of 3 rows begin or end with token 1, the padding of LlamaForCausalLM.*pass the mask"
    with pytest.warns(PaddingWarning, match=said):
        assert len(Targets.of(stream, batch)) == 3 * 7
    with pytest.warns(PaddingWarning, match=said):
        Targets.every(stream, batch, torch.zeros(3, 8, stream.classes))
    mask = (batch["input_ids"] != 1).long()
    assert len(Targets.of(stream, {**batch, "attention_mask": mask})) == 3 * 7 - 2
    ignored = batch["input_ids"].masked_fill(mask == 0, -100)
    Targets.of(stream, {**batch, "labels": ignored})


def test_an_end_token_that_is_also_padding_is_not_taken_for_it() -> None:
    model = ENTRIES["Llama-tied-CausalLM-left"].make()[0]
    model.config.pad_token_id = model.config.eos_token_id = 2
    stream = ed.as_stream(model)
    Targets.of(stream, padded(model, 1))
    with pytest.warns(PaddingWarning):
        Targets.of(stream, padded(model, 2))


def test_embeddings_that_average_padding_say_so() -> None:
    config = hf.BertConfig(**TEXT)
    model = hf.BertModel(config).eval()
    stream = ed.as_stream(model, task="embedding")
    with pytest.warns(PaddingWarning, match="the padding of BertModel"), torch.no_grad():
        stream.observe(padded(model, 1)).logits(1)
