"""`EveryDepth`: what its loss is for every kind of label, and that the model stays itself."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from tests.helpers.training import mlp
from tests.zoo import CAUSAL, CLASSIFIERS, ENTRIES, PAD
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

import everydepth as ed
from everydepth.errors import DepthError, ExportError, LabelError, NonFiniteError, SettingError

TINY = torch.float64
VIT, LLAMA, BERT, MLM = (
    "ViT",
    "Llama-tied-CausalLM-left",
    "Bert-SequenceClassification",
    "Bert-MaskedLM",
)


def make(kind: str, labels: Tensor | None = None) -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = ENTRIES[kind].make(TINY)
    if labels is None and "input_ids" in batch and ("CausalLM" in kind or "MaskedLM" in kind):
        real = batch["attention_mask"] != 0
        labels = batch["input_ids"].masked_fill(~real, -100)
        if "CausalLM" in kind:  # padding predicts nothing, also not the first token behind it
            labels[:, 1:] = labels[:, 1:].masked_fill(~real[:, :-1], -100)
    elif labels is None:
        labels = torch.randint(0, 3, (3,))
    return model, {**batch, "labels": labels}


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> bool:
    found, expected = found.detach(), expected.detach()
    return float((found - expected).norm()) <= tolerance * max(float(expected.norm()), 1e-3)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_gradients(
    found: dict[str, Tensor], expected: dict[str, Tensor], tol: float = 1e-10
) -> bool:
    assert found.keys() == expected.keys()
    return all(close(found[name], expected[name], tol) for name in expected)


def plain_lm_loss(logits: Tensor, labels: Tensor, shift: bool) -> Tensor:
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


# -- the loss of every depth ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [VIT, BERT, "CifarResNet-pre-pad", "GPT2-SequenceClassification-left"]
)
def test_lpa_is_the_weighted_sum_of_the_cross_entropies_of_all_depths(kind: str) -> None:
    model, batch = make(kind)
    net = ed.EveryDepth(model)  # eval mode: no dropout, batch norms still
    out = net(**batch)
    states = net.stream.observe(batch)
    losses = [F.cross_entropy(states.logits(d), batch["labels"]) for d in range(1, len(states))]
    expected = 0.1 * sum(losses[:-1]) + losses[-1]
    assert list(out.losses) == list(range(1, len(states)))
    assert all(close(out.losses[d], losses[d - 1]) for d in out.losses)
    assert close(out.loss, expected)
    assert same_gradients(gradients(model, out.loss), gradients(model, expected))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("kind", [*CAUSAL, MLM, "Roberta-MaskedLM", "DistilBert-MaskedLM"])
def test_language_models_predict_the_right_tokens_at_every_depth(kind: str, chunked: bool) -> None:
    model, batch = make(kind)
    net = ed.EveryDepth(model, any_depth_loss=chunked)
    out = net(**batch)
    states = net.stream.observe(batch)
    shift = net.stream.task == "causal_lm"
    losses = [
        plain_lm_loss(states.logits(d), batch["labels"], shift) for d in range(1, len(states))
    ]
    expected = 0.1 * sum(losses[:-1]) + losses[-1]
    assert all(close(out.losses[d], losses[d - 1]) for d in out.losses)
    assert close(out.loss, expected)
    assert same_gradients(gradients(model, out.loss), gradients(model, expected))


@pytest.mark.parametrize("kind", [VIT, LLAMA, MLM, BERT, "GPT2-CausalLM-right"])
def test_end_to_end_is_the_models_own_loss(kind: str) -> None:
    model, batch = make(kind)
    out = ed.EveryDepth(model, ed.end_to_end())(**batch)
    own = model(**batch)
    # Language models of transformers compute their loss in float32.
    assert close(out.loss, own.loss, 1e-6 if own.loss.dtype == torch.float32 else 1e-12)
    assert torch.equal(out.logits, own.logits)


def test_regression_is_the_mean_squared_error() -> None:
    model, batch = make("ResidualMLP-norm1-skips1-regression1", torch.randn(3, 2, dtype=TINY))
    net = ed.EveryDepth(model)
    states = net.stream.observe(batch)
    for depth, loss in net(**batch).losses.items():
        assert close(loss, F.mse_loss(states.logits(depth), batch["labels"]))


def test_one_number_a_row_may_come_as_a_vector() -> None:
    from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig

    net = ed.EveryDepth(ResidualMLP(ResidualMLPConfig()))
    x, y = torch.randn(5, 2), torch.randn(5)
    assert torch.equal(net(inputs=x, labels=y).loss, net(inputs=x, labels=y[:, None]).loss)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_label_smoothing_and_class_weights_are_torchs(smoothing: float) -> None:
    model, batch = make(VIT)
    weights = torch.rand(10) + 0.1
    net = ed.EveryDepth(model, label_smoothing=smoothing, class_weights=weights)
    states = net.stream.observe(batch)
    for depth, loss in net(**batch).losses.items():
        expected = F.cross_entropy(
            states.logits(depth),
            batch["labels"],
            weight=weights.to(TINY),
            label_smoothing=smoothing,
        )
        assert close(loss, expected, 1e-6)


@pytest.mark.parametrize("settings", [{"label_smoothing": 0.1}, {"class_weights": True}])
def test_the_chunked_loss_knows_smoothing_and_class_weights(settings: dict[str, object]) -> None:
    model, batch = make(LLAMA)
    if "class_weights" in settings:
        settings = {"class_weights": torch.rand(60) + 0.1}
    plain = ed.EveryDepth(model, any_depth_loss=False, **settings)(**batch)
    chunked = ed.EveryDepth(model, any_depth_loss=True, **settings)(**batch)
    assert close(chunked.loss, plain.loss, 1e-7)
    found, expected = gradients(model, chunked.loss), gradients(model, plain.loss)
    assert same_gradients(found, expected, 1e-7)


def test_shares_of_classes_are_labels_too() -> None:
    model, batch = make(VIT)
    shares = torch.rand(3, 10, dtype=TINY).softmax(-1)
    out = ed.EveryDepth(model, ed.end_to_end())(**{**batch, "labels": shares})
    assert close(out.loss, F.cross_entropy(model(batch["pixel_values"]).logits, shares))


@pytest.mark.parametrize("chunked", [False, True])
def test_each_token_counts_by_its_weight(chunked: bool) -> None:
    model, batch = make(LLAMA)
    weights = torch.rand(batch["labels"].shape, dtype=TINY)
    net = ed.EveryDepth(model, ed.end_to_end(), any_depth_loss=chunked)
    labels, w = batch["labels"][:, 1:].flatten(), weights[:, 1:].flatten()
    logits = model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1].flatten(0, 1)
    rows = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
    w = w * (labels != -100)
    assert close(net(**batch, loss_weights=weights).loss, (rows * w).sum() / w.sum(), 1e-6)


def test_padding_is_ignored_also_where_labels_do_not_say_so() -> None:
    model, batch = make(LLAMA)
    net = ed.EveryDepth(model)
    careless = {**batch, "labels": batch["input_ids"]}
    assert bool((batch["input_ids"] == PAD).any())
    assert torch.equal(net(**careless).loss, net(**batch).loss)


def test_token_level_classes_are_supported() -> None:
    class Residual(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (as in torch)
            return input + super().forward(input)

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Residual(8, 8), Residual(8, 8)])
            self.head = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    net = ed.EveryDepth(Tagger(), blocks="layers", readout=("head",), token="all")
    x, labels = torch.randn(3, 4, 8), torch.randint(0, 5, (3, 4))
    labels[0, 0] = -100
    out = net(x=x, labels=labels)
    expected = F.cross_entropy(net.model(x).flatten(0, 1), labels.flatten())
    assert close(out.losses[2], expected, 1e-6)


def test_items_in_batch_replace_the_number_of_labels() -> None:
    # Hugging Face's Trainer passes them, so that accumulated gradients are those of one batch.
    model, batch = make(LLAMA)
    net = ed.EveryDepth(model, ed.end_to_end())
    count = int((batch["labels"][:, 1:] != -100).sum())
    twice = net(**batch, num_items_in_batch=torch.tensor(2 * count)).loss
    assert close(2 * twice, net(**batch).loss, 1e-6)
    pulled = ed.EveryDepth(model, ed.cosine_regularized(50.0))
    half = pulled(**batch, num_items_in_batch=torch.tensor(2 * count)).regularizer
    assert close(2 * half, pulled(**batch).regularizer, 1e-6)


def test_items_in_batch_are_counted_as_trainer_counts_labels_of_several_numbers() -> None:
    model, batch = make(VIT, torch.rand(3, 10, dtype=TINY).softmax(-1))
    numbers = {"inputs": torch.randn(3, 4), "labels": torch.randn(3, 2)}
    for net, data in ((ed.EveryDepth(model), batch), (ed.EveryDepth(mlp()), numbers)):
        for count in (data["labels"].numel(), data["labels"].ne(-100).sum()):
            assert close(net(**data, num_items_in_batch=count).loss, net(**data).loss, 1e-6)


@pytest.mark.parametrize("balconies", [False, True])
def test_trainer_takes_the_same_step_in_accumulated_batches(
    balconies: bool, tmp_path: Path
) -> None:
    _, batch = make(LLAMA)
    ids = batch["input_ids"][:1].expand(4, -1).clone()
    ids[:, 2] += torch.arange(4)
    rows = [{"input_ids": row, "labels": row} for row in ids]

    def moved(pieces: int) -> dict[str, Tensor]:
        model = ENTRIES[LLAMA].make()[0]
        net = ed.balcony(model, [1, 2]) if balconies else ed.EveryDepth(model, ed.lpa())
        settings = TrainingArguments(
            tmp_path,
            per_device_train_batch_size=4 // pieces,
            gradient_accumulation_steps=pieces,
            max_steps=1,
            learning_rate=1.0,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            save_strategy="no",
        )
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        Trainer(model=net, args=settings, train_dataset=rows).train()
        return {name: p.detach() - before[name] for name, p in net.named_parameters()}

    whole, pieces = moved(1), moved(2)
    length = torch.cat([step.flatten() for step in whole.values()]).norm()
    apart = torch.cat([(step - pieces[name]).flatten() for name, step in whole.items()]).norm()
    assert length > 0
    assert apart < 1e-3 * length


def test_a_criterion_of_your_own_gets_prediction_labels_and_context() -> None:
    model, batch = ENTRIES["Detr-plain"].make()
    boxes = torch.rand(3, 6, 4)

    def criterion(z: Tensor, labels: Tensor, context: Mapping[str, Any]) -> Tensor:
        apart = (context["pred_boxes"] - labels).abs() + context["pixel_values"].mean()
        return z.square().mean((1, 2)) + apart.mean((1, 2))

    out = ed.EveryDepth(model, ed.aligned(), criterion=criterion)(**batch, labels=boxes)
    own = model(**batch)
    expected = own.logits.square().mean() + F.l1_loss(own.pred_boxes, boxes)
    assert close(out.losses[4], expected + batch["pixel_values"].mean(), 1e-6)
    assert list(out.losses) == [1, 2, 3, 4]


def test_a_criterion_that_gives_one_number_for_all_rows_is_refused() -> None:
    model, batch = ENTRIES["Detr-plain"].make()
    net = ed.EveryDepth(model, criterion=lambda z, _, __: z.square().mean())
    with pytest.raises(SettingError, match=r"criterion returned shape \(\), but there are 3 rows"):
        net(**batch, labels=torch.zeros(3))


# -- what a pass gives ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_every_family_of_classifiers_trains_at_every_depth(kind: str) -> None:
    model, batch = ENTRIES[kind].make()
    net = ed.EveryDepth(model).train()
    out = net(**batch, labels=torch.randint(0, 3, (3,)))
    out.loss.backward()
    assert bool(torch.isfinite(out.loss))
    assert list(out.losses) == list(range(1, net.stream.depth + 1))


def test_without_labels_it_gives_the_models_own_logits() -> None:
    model, batch = make(VIT)
    del batch["labels"]
    out = ed.EveryDepth(model)(**batch)
    assert out.loss is None
    assert out.losses is None
    assert torch.equal(out.logits, model(**batch).logits)


def test_other_depths_are_given_on_request() -> None:
    model, batch = make(VIT)
    net = ed.EveryDepth(model, ed.end_to_end())
    out = net(**batch, depths=[0, 2, 4])
    states = net.stream.observe(batch)
    assert all(torch.equal(out.logits_at[d], states.logits(d)) for d in (0, 2, 4))
    assert list(out.losses) == [0, 2, 4]
    assert net(**batch).logits_at is None
    with pytest.raises(DepthError, match="depth 5, but ViTForImageClassification has 4 blocks"):
        net(**batch, depths=[5])


def test_a_large_head_gives_no_logits_in_training_unless_asked() -> None:
    model, batch = make(LLAMA)
    net = ed.EveryDepth(model, any_depth_loss=True).train()
    assert net(**batch).logits is None
    asked = net(**batch, depths=[4])
    assert asked.logits.shape == (3, 7, 60)
    assert asked.logits_at[4] is asked.logits
    assert net.eval()(**batch).logits is not None


def test_passes_in_training_mode_are_counted_unless_told() -> None:
    model, batch = make(VIT)
    net = ed.EveryDepth(model, ed.aligned()).train()
    assert [len(net(**batch).losses) for _ in range(4)] == [4, 1, 4, 1]
    net.set_progress(7, 100)
    assert [len(net(**batch).losses) for _ in range(2)] == [1, 1]


def test_evaluation_draws_nothing() -> None:
    model, batch = make(VIT)
    net = ed.EveryDepth(model, ed.lpa().sampled(1))
    assert list(net(**batch).losses) == [1, 2, 3, 4]
    assert len(net.train()(**batch).losses) == 2


# -- objectives that do more than weigh -----------------------------------------------------------


def test_the_cosine_regularizer_pulls_on_the_states() -> None:
    model, batch = make(VIT)
    out = ed.EveryDepth(model, ed.cosine_regularized(0.5))(**batch)
    states = ed.as_stream(model).observe(batch)
    h = [states.feature(d) for d in range(5)]
    expected = sum(
        0.5 * 2 * d / 20 * (1 - F.cosine_similarity(h[d], h[4], dim=-1)).mean() for d in range(1, 4)
    )
    assert close(out.regularizer, expected)
    assert close(out.loss, out.losses[4] + expected)


def test_the_cosine_regularizer_weights_rows_as_the_loss_does() -> None:
    model, batch = make(VIT, torch.tensor([0, 2, 1]))
    per_class = torch.tensor([1.0, 2.0, 5.0, *[1.0] * 7])
    out = ed.EveryDepth(model, ed.cosine_regularized(0.5), class_weights=per_class)(**batch)
    states = ed.as_stream(model).observe(batch)
    h = [states.feature(d) for d in range(5)]
    shares = torch.tensor([1.0, 5.0, 2.0], dtype=TINY) / 8
    expected = sum(
        0.5 * 2 * d / 20 * (shares * (1 - F.cosine_similarity(h[d], h[4], dim=-1))).sum()
        for d in range(1, 4)
    )
    assert close(out.regularizer, expected)


def test_without_labeled_rows_the_cosine_regularizer_is_zero() -> None:
    model, batch = make(MLM)
    net = ed.EveryDepth(model, ed.cosine_regularized(0.5))
    net(**batch)
    out = net(**{**batch, "labels": torch.full_like(batch["labels"], -100)})
    out.loss.backward()
    assert out.loss == 0
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_each_depth_of_a_multi_classifier_has_its_own_head() -> None:
    model, batch = make(VIT)
    net = ed.EveryDepth(model, ed.multi_classifier())
    out = net(**batch)
    states = net.stream.observe(batch)
    for depth in range(1, 4):
        own = F.cross_entropy(
            net.heads[str(depth)](net.stream.normed(states.feature(depth), depth)), batch["labels"]
        )
        assert close(out.losses[depth], own)
    assert sum(p.numel() for p in net.heads.parameters()) == 3 * (32 * 10 + 10)


@pytest.mark.parametrize("kind", [VIT, LLAMA])
def test_the_divergence_to_the_last_depth_is_softened_and_one_way(kind: str) -> None:
    model, batch = make(kind)
    net = ed.EveryDepth(model, ed.multi_classifier(kl=0.7, temperature=2.0, weights="uniform"))
    out = net(**batch, depths=[1, 2, 3, 4])
    pick = (lambda z: z) if kind == VIT else (lambda z: z[:, :-1][batch["labels"][:, 1:] != -100])
    p = (pick(out.logits_at[4]).detach() / 2).softmax(-1)
    expected = torch.zeros((), dtype=TINY)
    for depth in range(1, 4):
        q = (pick(out.logits_at[depth]) / 2).log_softmax(-1)
        expected += 0.7 / 4 * 4 * (p * (p.log() - q)).sum(-1).mean()
    assert close(out.regularizer, expected, 1e-9)
    assert close(out.loss, sum(out.losses.values()) / 4 + expected, 1e-6)


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_distilled_objective_is_the_same_in_chunks(labels: bool, temperature: float) -> None:
    model, batch = make(LLAMA)
    goal = ed.lpa(early=0.3).distilled(0.5, temperature, labels=labels)
    plain, chunked = (
        ed.EveryDepth(model, goal, any_depth_loss=ways)(**batch) for ways in (False, True)
    )
    assert close(chunked.loss, plain.loss)
    assert close(chunked.regularizer, plain.regularizer, 1e-9)
    assert all(close(chunked.losses[d], plain.losses[d]) for d in plain.losses)
    # The norm of this model works in float32, once for the sum here, for each summand there.
    assert same_gradients(gradients(model, chunked.loss), gradients(model, plain.loss), 1e-6)
    early = 0.3 if labels else 0.0
    counted = early * sum(list(plain.losses.values())[:-1]) + plain.losses[4]
    assert close(plain.loss, counted + plain.regularizer)


@pytest.mark.parametrize("chunked", [False, True])
def test_text_without_labels_is_distilled_at_every_token_that_is_not_padding(
    chunked: bool,
) -> None:
    model, batch = make(LLAMA)
    del batch["labels"]
    net = ed.EveryDepth(model, ed.lpa(early=0.3).distilled(0.5), any_depth_loss=chunked)
    out = net(**batch)
    states, real = net.stream.observe(batch), batch["attention_mask"] != 0
    p = states.logits(4)[real].detach().log_softmax(-1)
    expected = {
        depth: F.kl_div(
            states.logits(depth)[real].log_softmax(-1), p, reduction="batchmean", log_target=True
        )
        for depth in range(1, 4)
    }
    assert list(out.losses) == [1, 2, 3]
    assert all(close(out.losses[d], expected[d], 1e-9) for d in expected)
    total = 0.15 * sum(expected.values())
    assert close(out.loss, total, 1e-9)
    assert same_gradients(gradients(model, out.loss), gradients(model, total), 1e-6)


@pytest.mark.parametrize("chunked", [False, True])
def test_without_labels_and_without_a_shallow_depth_the_loss_is_zero_and_can_go_backward(
    chunked: bool,
) -> None:
    model, batch = make(LLAMA)
    del batch["labels"]
    goal = ed.lpa().annealed(by=0.5).distilled()
    net = ed.EveryDepth(model, goal, any_depth_loss=chunked).train()
    net.set_progress(9, 10)
    loss = net(**batch).loss
    loss.backward()
    assert float(loss.detach()) == 0
    assert not any(bool(p.grad.any()) for p in model.parameters() if p.grad is not None)


def test_a_distilled_regression_is_refused() -> None:
    model, batch = make("ResidualMLP-norm1-skips1-regression1", torch.randn(3, 2, dtype=TINY))
    with pytest.raises(SettingError, match="predicts numbers; leave it out"):
        ed.EveryDepth(model, ed.lpa().distilled())(**batch)


def test_a_distilled_objective_without_a_student_is_refused() -> None:
    model, _ = make(VIT)
    with pytest.raises(SettingError, match=r"no depth below the last .*use lpa or ladder"):
        ed.EveryDepth(model, ed.end_to_end().distilled())


def test_a_chunked_multi_classifier_equals_a_plain_one() -> None:
    model, batch = make(LLAMA)
    plain = ed.EveryDepth(model, ed.multi_classifier(), any_depth_loss=False)
    chunked = ed.EveryDepth(model, ed.multi_classifier(), any_depth_loss=True)
    chunked.load_state_dict(plain.state_dict())
    a, b = plain(**batch), chunked(**batch)
    assert close(a.loss, b.loss)
    assert same_gradients(gradients(plain, a.loss), gradients(chunked, b.loss))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("weights", [[0.0, 1.0, 1.0, 1.0, 1.0], [0.0, 0.5, 0.0, 0.2, 1.0]])
def test_equilibrium_divides_each_blocks_gradient_by_the_weight_from_there_on(
    weights: list[float], chunked: bool
) -> None:
    model, batch = make("GPT2-CausalLM-right")  # float64 throughout
    plain = gradients(model, ed.EveryDepth(model, ed.weighted(weights))(**batch).loss)
    net = ed.EveryDepth(model, ed.weighted(weights).equilibrated(), any_depth_loss=chunked)
    balanced = gradients(model, net(**batch).loss)
    for number in range(1, 5):
        names = [name for name in plain if f".h.{number - 1}." in name]
        assert len(names) > 4
        for name in names:
            assert close(balanced[name], plain[name] / sum(weights[number:]), 1e-10), name
    assert close(balanced["transformer.ln_f.weight"], plain["transformer.ln_f.weight"], 1e-10)


# -- layer dropout --------------------------------------------------------------------------------


def by_hand(net: ed.EveryDepth, batch: dict[str, Tensor], kept: Tensor) -> list[Tensor]:
    """Every sample alone, through its own blocks: no masks of others, no row selection."""
    rows: list[list[Tensor]] = []
    for row in range(kept.shape[1]):
        alone = {k: v[row : row + 1] for k, v in batch.items() if k != "labels"}
        cursor = net.stream.start(alone)
        states = [cursor.h]
        for depth in range(net.stream.depth):
            after = net.stream.step(cursor)
            cursor = copy.copy(after)
            object.__setattr__(cursor, "h", after.h if kept[depth, row] else states[-1])
            states.append(cursor.h)
        rows.append(states)
    return [torch.cat([states[d] for states in rows]) for d in range(net.stream.depth + 1)]


@pytest.mark.parametrize(
    "kind",
    [LLAMA, "Mistral-window-CausalLM-left", "GPT2-CausalLM-right", MLM, VIT, "Beit-class-token"],
)
def test_layer_dropout_gives_each_sample_its_own_masks_and_positions(kind: str) -> None:
    from everydepth.objectives.layer_dropout import observe_kept

    model, batch = make(kind)
    net = ed.EveryDepth(model, ed.layerskip(dropout=0.5))
    kept = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    found = observe_kept(net.stream, inputs, kept)
    for ours, expected in zip(found, by_hand(net, batch, kept), strict=True):
        assert close(ours, expected, 1e-10)


def test_a_block_that_nobody_runs_gets_a_gradient_of_zero() -> None:
    from everydepth.objectives.layer_dropout import observe_kept

    model, batch = make(LLAMA)
    kept = torch.ones(4, 3, dtype=torch.bool)
    kept[2] = False
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    states = observe_kept(ed.as_stream(model), inputs, kept)
    states.logits(4).square().mean().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert bool(p.grad.any()) == ("layers.2." not in name), name


def test_layer_dropout_is_off_in_evaluation_and_repeats_in_training() -> None:
    model, batch = make(LLAMA)
    net = ed.EveryDepth(model, ed.layerskip(dropout=0.9, curriculum=None))
    full = net(**batch).losses[4]
    net.train().set_progress(5)
    first, second = net(**batch).losses[4], net(**batch).losses[4]
    net.set_progress(6)
    assert close(full, F.cross_entropy(*_shifted(model, batch)))
    assert torch.equal(first, second)
    assert not torch.equal(first, full)
    assert not torch.equal(first, net(**batch).losses[4])


def _shifted(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits = model(batch["input_ids"], batch["attention_mask"]).logits
    return logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()


# -- an ordinary module ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [VIT, LLAMA, "CifarResNet-post-projection"])
def test_the_state_dict_is_the_plain_models_own(kind: str) -> None:
    model, _ = make(kind)
    state = ed.EveryDepth(model).state_dict()
    assert list(state) == list(model.state_dict())
    other = ENTRIES[kind].build().to(TINY)
    assert other.load_state_dict(state).missing_keys == []
    fresh = ed.EveryDepth(ENTRIES[kind].build().to(TINY))
    fresh.load_state_dict(model.state_dict())
    assert all(torch.equal(fresh.state_dict()[key], value) for key, value in state.items())
    # Also as a part of another module, which prefixes the keys.
    outer = nn.ModuleDict({"net": ed.EveryDepth(ENTRIES[kind].build().to(TINY))})
    assert list(outer.state_dict()) == [f"net.{key}" for key in state]
    outer.load_state_dict({f"net.{key}": value for key, value in state.items()})
    assert all(torch.equal(outer["net"].state_dict()[key], value) for key, value in state.items())


def test_loading_another_models_state_is_an_error() -> None:
    net = ed.EveryDepth(make(VIT)[0])
    with pytest.raises(RuntimeError, match="Missing key"):
        net.load_state_dict(make(LLAMA)[0].state_dict())


def test_heads_are_saved_under_their_own_prefix() -> None:
    model, _ = make(VIT)
    state = ed.EveryDepth(model, ed.multi_classifier()).state_dict()
    extra = [key for key in state if key not in model.state_dict()]
    assert extra == [f"heads.{d}.{part}" for d in (1, 2, 3) for part in ("weight", "bias")]
    fresh = ed.EveryDepth(ENTRIES[VIT].build().to(TINY), ed.multi_classifier())
    fresh.load_state_dict(state)
    assert all(torch.equal(fresh.state_dict()[key], value) for key, value in state.items())


def test_a_model_with_heads_of_its_own_cannot_be_a_multi_classifier() -> None:
    model, _ = make(VIT)
    model.heads = nn.Linear(1, 1)
    with pytest.raises(SettingError, match=r"already has an attribute `heads`.*rename it"):
        ed.EveryDepth(model, ed.multi_classifier())
    assert list(ed.EveryDepth(model).state_dict()) == list(model.state_dict())


def test_save_pretrained_saves_the_plain_model(tmp_path: Path) -> None:
    from transformers import ViTForImageClassification

    model, batch = make(VIT)
    ed.EveryDepth(model).save_pretrained(tmp_path)
    loaded = ViTForImageClassification.from_pretrained(tmp_path, dtype=TINY).eval()
    pixels = batch["pixel_values"]
    assert torch.equal(loaded(pixels).logits, model(pixels).logits)


@pytest.mark.parametrize("kind", [BERT, "DistilBert-MaskedLM"])
def test_a_copy_trains_its_own_model(kind: str) -> None:
    # Some streams hold functions bound to their model's modules.
    model, batch = make(kind)
    net = ed.EveryDepth(model)
    net(**batch)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert twin.stream.model is twin.model
    assert not bool((twin(**batch, depths=[1]).logits_at[1] == 0).all())


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("objective", [ed.lpa().equilibrated(), ed.layerskip(dropout=0.5)])
def test_gradient_checkpointing_changes_nothing(
    objective: ed.Objective, reentrant: bool, chunked: bool
) -> None:
    model, batch = make(LLAMA)
    net = ed.EveryDepth(model, objective, any_depth_loss=chunked).train()
    net.set_progress(3)
    expected = gradients(model, net(**batch).loss)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    found = gradients(model, net(**batch).loss)
    assert same_gradients(found, expected)


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("objective", [ed.lpa().sampled(1), ed.layerskip(dropout=0.9)])
def test_distributed_data_parallel_finds_every_parameter_used(
    objective: ed.Objective, chunked: bool
) -> None:
    # DDP fails at the second pass if a parameter had no gradient in the first.
    model, batch = make(LLAMA)
    net = ed.EveryDepth(model, objective, any_depth_loss=chunked).train()
    wrapped = DistributedDataParallel(net)
    for step in range(3):
        net.set_progress(step)
        expected = gradients(model, net(**batch).loss)
        assert same_gradients(gradients(model, wrapped(**batch).loss), expected)


@pytest.mark.usefixtures("one_process_group")
def test_a_measure_takes_the_place_of_the_loss_also_in_a_wrapped_module() -> None:
    model, batch = make(VIT)
    wrapped = DistributedDataParallel(ed.EveryDepth(model))

    def feature(net: ed.EveryDepth, given: dict[str, Tensor]) -> Tensor:
        assert net is wrapped.module
        return net.stream.observe(given).feature(2)

    expected = ed.as_stream(model).observe(batch).feature(2)
    assert torch.equal(wrapped(measure=feature, **batch), expected)
    assert wrapped.module.step == 0


@pytest.mark.parametrize("kind", [VIT, LLAMA])
def test_it_runs_under_autocast(kind: str) -> None:
    model, batch = ENTRIES[kind].make()
    labels = batch["input_ids"] if kind == LLAMA else torch.randint(0, 3, (3,))
    exact = [ed.EveryDepth(model, any_depth_loss=c)(**batch, labels=labels) for c in (False, True)]
    with torch.autocast("cpu", torch.bfloat16):
        low = [
            ed.EveryDepth(model, any_depth_loss=c)(**batch, labels=labels) for c in (False, True)
        ]
    for a, b in zip(exact, low, strict=True):
        assert b.loss.dtype == torch.float32
        assert close(a.loss, b.loss, 3e-2)
        b.loss.backward()


def test_a_large_vocabulary_is_chunked_and_a_small_head_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from everydepth.training import module

    used: list[str] = []
    plain = module.any_depth_loss
    monkeypatch.setattr(
        module, "any_depth_loss", lambda *a, **k: (used.append("chunked"), plain(*a, **k))[1]
    )
    model, batch = make(LLAMA)
    ed.EveryDepth(model)(**batch)
    assert used == []
    monkeypatch.setattr(module, "LARGE_LOGITS", 60)
    ed.EveryDepth(model)(**batch)
    assert used == ["chunked"]


# -- bad input ------------------------------------------------------------------------------------


def test_labels_outside_the_head_are_refused_at_any_step() -> None:
    model, batch = make(VIT)
    net = ed.EveryDepth(model)
    net(**batch)
    with pytest.raises(LabelError, match=r"label 10, but the head of ViT.* has 10 classes"):
        net(**{**batch, "labels": torch.tensor([0, 10, 1])})
    with pytest.raises(LabelError, match="label -3"):
        net(**{**batch, "labels": torch.tensor([0, -3, 1])})


def test_a_first_batch_with_nothing_to_learn_from_is_refused_a_later_one_is_not() -> None:
    model, batch = make(MLM)
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    net = ed.EveryDepth(model)
    with pytest.raises(LabelError, match="the data has no labels: all are -100"):
        net(**nothing)
    net(**batch)
    out = net(**nothing)
    out.loss.backward()
    assert out.loss == 0


@pytest.mark.parametrize(
    ("kind", "labels", "message"),
    [
        (LLAMA, torch.zeros(3, 5, dtype=torch.long), r"labels have shape \(3, 5\), but .*\(3, 7\)"),
        (VIT, torch.rand(3, 4, dtype=TINY), "labels have 4 numbers per row, predictions 10"),
        (
            "ResidualMLP-norm1-skips1-regression1",
            torch.rand(3, 3, dtype=TINY),
            "labels have 3 numbers per row, predictions 2",
        ),
    ],
)
def test_labels_of_the_wrong_shape_are_refused(kind: str, labels: Tensor, message: str) -> None:
    model, batch = make(kind, labels)
    with pytest.raises(LabelError, match=message):
        ed.EveryDepth(model)(**batch)


def test_loss_weights_of_the_wrong_shape_are_refused() -> None:
    model, batch = make(VIT)
    with pytest.raises(LabelError, match=r"loss_weights have shape \(2,\), labels \(3,\)"):
        ed.EveryDepth(model)(**batch, loss_weights=torch.ones(2))


def test_a_task_without_a_built_in_loss_asks_for_one() -> None:
    model, batch = ENTRIES["Detr-plain"].make()
    with pytest.raises(SettingError, match=r"does detection.*pass criterion="):
        ed.EveryDepth(model)(**batch, labels=torch.zeros(3))


@pytest.mark.parametrize("chunked", [False, True])
def test_nan_is_named_by_the_first_depth_at_which_it_appears(chunked: bool) -> None:
    model, batch = make(LLAMA)
    net = ed.EveryDepth(model, raise_on_nan=True, any_depth_loss=chunked)
    net(**batch)
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"first appears after block 3 \(depth 3 of 4\)") as e:
        net(**batch)
    assert e.value.depth == 3


def test_a_loss_that_alone_is_nan_is_named_too() -> None:
    model, batch = make(VIT)
    net = ed.EveryDepth(model, raise_on_nan=True)
    with torch.no_grad():
        model.classifier.bias[0] = torch.nan
    with pytest.raises(NonFiniteError, match="loss at depth 1 is NaN or infinite, although all"):
        net(**batch)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label_smoothing": 1.0}, r"label_smoothing=1.0\); use a number from 0 to below 1"),
        ({"class_weights": [1.0, 2.0]}, r"shape \(2,\), but .* 10 classes; give one number"),
        ({"objective": ed.weighted([1.0, 1.0])}, "2 weights, but the network has 4 blocks; give 5"),
    ],
)
def test_a_setting_that_does_not_fit_the_model_is_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        ed.EveryDepth(make(VIT)[0], **settings)


def test_forward_names_the_inputs_of_the_model_for_what_reads_signatures() -> None:
    net = ed.EveryDepth(ENTRIES["ViT"].make()[0])
    for one in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):  # noqa: S301 - our own
        names = list(inspect.signature(one.forward).parameters)
        assert names[:4] == ["depths", "measure", "labels", "pixel_values"]
        assert names[-1] == "batch"
        assert one.forward.args[0] is one  # a copy runs itself, not what it was copied from


def test_the_trainer_of_hugging_face_takes_the_net_as_it_is(tmp_path: Path) -> None:
    rows = {
        "pixel_values": torch.randn(16, 3, 32, 32).tolist(),
        "label": [i % 2 for i in range(16)],
    }
    data = datasets.Dataset.from_dict({**rows, "note": ["dropped"] * 16})
    net = ed.EveryDepth(ENTRIES["ViT"].make()[0])
    settings = TrainingArguments(
        tmp_path, max_steps=2, report_to="none", disable_tqdm=True, use_cpu=True
    )
    trainer = Trainer(model=net, args=settings, train_dataset=data, eval_dataset=data)
    trainer.train()
    found = trainer.evaluate()
    batch = {
        "pixel_values": torch.tensor(rows["pixel_values"]),
        "labels": torch.tensor(rows["label"]),
    }
    with torch.no_grad():
        expected = net.eval()(**batch).loss
    assert found["eval_loss"] == pytest.approx(float(expected), rel=1e-5)


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    net = ed.EveryDepth(make(VIT)[0])
    with pytest.raises(ExportError, match=r"cannot be saved: File name too long.*shorter"):
        net.save_pretrained(tmp_path / ("x" * 300))
    assert not list(tmp_path.iterdir())
