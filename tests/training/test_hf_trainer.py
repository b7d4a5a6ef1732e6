"""Hugging Face's Trainer takes an `EveryDepth` as it takes the plain model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tests.helpers.training import same, weights
from torch import nn
from transformers import (
    EvalPrediction,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback

import everydepth as ed
from everydepth.errors import LabelError
from everydepth.training.lora import with_lora

ROWS, LENGTH, WORDS = 8, 9, 61


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=WORDS, tie_word_embeddings=tied, **sizes, **heads)
    return LlamaForCausalLM(config).double()


def text() -> dict[str, list[Any]]:
    """Rows with few labels, with none, and without the first label, which no token predicts."""
    ids = torch.randint(1, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[1, :5] = labels[0] = labels[2] = labels[3, 4:] = labels[6, 0] = -100
    mask = torch.ones_like(ids)
    mask[4, 7:] = 0
    labels[4, 7:] = -100
    columns = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    return {name: column.tolist() for name, column in columns.items()}


def trained(
    net: nn.Module, folder: Path, *, pieces: int = 1, steps: int = 3, **more: Any
) -> Trainer:
    how: dict[str, Any] = {"learning_rate": 0.5, "lr_scheduler_type": "constant", "optim": "sgd"}
    settings = TrainingArguments(
        folder,
        per_device_train_batch_size=ROWS // pieces,
        gradient_accumulation_steps=pieces,
        max_steps=steps,
        max_grad_norm=0,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        train_sampling_strategy="sequential",
        save_strategy="steps" if "save_steps" in more else "no",
        **how,
        **{k: v for k, v in more.items() if k != "resume"},
    )
    data: Any = datasets.Dataset.from_dict({**text(), "note": ["dropped"] * ROWS})
    trainer = Trainer(model=net, args=settings, train_dataset=data, eval_dataset=data)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=more.get("resume"))
    return trainer


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pieces", [1, 2, 8])
def test_end_to_end_takes_the_steps_of_the_plain_model(
    pieces: int, tied: bool, tmp_path: Path
) -> None:
    plain = llama(tied=tied)
    net = ed.EveryDepth(llama(tied=tied), ed.end_to_end())
    logs: list[list[float]] = []
    for model in (plain, net):
        trainer = trained(model, tmp_path, pieces=pieces)
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        logs.append([*losses, trainer.evaluate()["eval_loss"]])
    # transformers computes its loss in float32.
    assert logs[1] == pytest.approx(logs[0], rel=1e-6)
    for ours, theirs in zip(net.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_every_depths_mean_counts_what_its_labels_predict(tmp_path: Path) -> None:
    net = ed.EveryDepth(llama(), ed.lpa())
    net.train()
    columns = {name: torch.tensor(column) for name, column in text().items()}
    expected = net(**columns).loss.item()
    trainer = trained(net, tmp_path, pieces=4, steps=1)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-6)


def test_metrics_get_the_logits_and_the_losses_of_every_depth(tmp_path: Path) -> None:
    seen: list[Any] = []

    def look(found: EvalPrediction) -> dict[str, float]:
        seen.append(found.predictions)
        return {}

    settings = TrainingArguments(tmp_path, report_to="none", disable_tqdm=True, use_cpu=True)
    data: Any = datasets.Dataset.from_dict(text())
    net = ed.EveryDepth(llama())
    trainer = Trainer(model=net, args=settings, eval_dataset=data, compute_metrics=look)
    trainer.remove_callback(PrinterCallback)
    trainer.evaluate()
    trainer.evaluate(ignore_keys=["losses", "regularizer"])
    (logits, losses), alone = seen
    assert sorted(losses) == [1, 2, 3]
    assert logits.shape == alone.shape == (ROWS, LENGTH, WORDS)


def test_text_without_any_label_is_refused() -> None:
    net = ed.EveryDepth(llama())
    nothing = {"input_ids": torch.ones(1, 4).long(), "labels": torch.full((1, 4), -100)}
    with pytest.raises(LabelError, match="the data has no labels"):
        net(**nothing)


def balconies() -> ed.EveryDepth:
    return ed.balcony(llama(tied=True), [1, 2])


@pytest.mark.parametrize(
    "make",
    [
        lambda: ed.EveryDepth(llama()),
        lambda: ed.EveryDepth(llama(tied=True)),
        lambda: ed.EveryDepth(with_lora(llama(tied=True), rank=2)),
        lambda: ed.EveryDepth(llama(tied=True), ed.multi_classifier()),
        balconies,
    ],
    ids=["plain", "tied", "lora", "heads", "balconies"],
)
def test_its_checkpoints_are_saved_and_resumed_exactly(
    make: Callable[[], ed.EveryDepth], tmp_path: Path
) -> None:
    whole, cut, resumed = make(), make(), make()
    trained(whole, tmp_path / "whole", steps=3)
    trained(cut, tmp_path / "cut", steps=2, save_steps=1)
    assert not same(weights(cut), weights(whole))
    trained(resumed, tmp_path / "cut", steps=3, save_steps=1, resume=True)
    assert same(weights(resumed), weights(whole))


def test_tied_weights_stay_tied_and_a_state_dict_fits_the_plain_model() -> None:
    net = ed.EveryDepth(llama(tied=True))
    state = net.state_dict()
    plain = llama(tied=True)
    plain.load_state_dict(state)
    assert same(weights(plain), weights(net.model))
    assert len({value.untyped_storage().data_ptr() for value in state.values()}) == len(state)
    shared = net.state_dict(keep_vars=True)
    assert shared["lm_head.weight"] is shared["model.embed_tokens.weight"]


def test_models_with_balconies_name_the_inputs_of_the_model() -> None:
    net = balconies()
    expected = list(inspect.signature(llama().forward).parameters)
    for one in (net, copy.deepcopy(net)):
        assert list(inspect.signature(one.model.forward).parameters) == expected
        assert {"input_ids", "attention_mask", "loss_weights"} <= {
            *inspect.signature(one.forward).parameters
        }
        assert one.model.forward.args[0] is one.model


def test_balconies_get_the_mask_of_a_hugging_face_data_set() -> None:
    seen: list[set[str]] = []
    net = balconies()
    net.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(set(kwargs)), with_kwargs=True
    )
    data = datasets.Dataset.from_dict({**text(), "note": ["dropped"] * ROWS})
    ed.fit(net, data, steps=1, batch_size=4, progress=False)
    assert "attention_mask" in seen[0]
