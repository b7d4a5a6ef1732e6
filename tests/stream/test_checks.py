"""The conformance suite catches adapters that are wrong, and says where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.zoo import ENTRIES
from torch import Tensor, nn

import everydepth as ed
from everydepth.errors import EveryDepthError
from everydepth.stream import Block, ResidualStream


class Liar(ResidualStream):
    """A ViT adapter with one thing wrong."""

    inputs = ("pixel_values",)
    task = "classification"

    def __init__(self, model: Any, lie: str) -> None:
        self.model, self.lie = model, lie
        self._true = ed.as_stream(model)
        self.options = {}

    @property
    def blocks(self) -> list[Block]:
        blocks = list(self._true.blocks)
        first, second = blocks[1].branches
        if self.lie == "out":
            first = replace(first, out=self.model.vit.layers[1].attention.v_proj)
        if self.lie == "entry":
            second = replace(second, entry=self.model.vit.layers[1].mlp.fc1)
        if self.lie == "proj":
            second = replace(second, proj=self.model.vit.layers[1].mlp.fc1)
        blocks[1] = replace(blocks[1], branches=(first, second))
        return blocks

    @property
    def head(self) -> nn.Module:
        return self._true.head

    def feature(self, h: Tensor, depth: int, batch: Any) -> Tensor:
        return h[:, 1] if self.lie == "token" else self._true.feature(h, depth, batch)

    def normed(self, feature: Tensor, depth: int) -> Tensor:
        return feature if self.lie == "norm" else self._true.normed(feature, depth)

    def after_block(self, h: Tensor, depth: int) -> Tensor:
        # Statistics over the batch: rows are no longer independent of one another.
        return h - h.mean(0) if self.lie == "rows" else h

    def truncated(self, depth: int, *, share: bool) -> nn.Module:
        return self._true.truncated(max(depth - (self.lie == "depth"), 1), share=share)


LIES = {
    "norm": "last depth is the model",
    "token": "last depth is the model",
    "entry": "branches add up",
    "out": "branches add up",
    "proj": "a zero projection is silent",
    "rows": "rows can be selected",
    "depth": "truncation gives the same",
}


@pytest.mark.parametrize(("lie", "clause"), LIES.items())
def test_a_wrong_adapter_fails_the_clause_it_breaks(lie: str, clause: str) -> None:
    model, batch = ENTRIES["ViT"].make()
    nn.init.normal_(model.vit.layers[1].mlp.fc2.bias)
    report = ed.check_stream(Liar(model, lie), batch)
    assert not report.ok
    failed = [check.name for check in report.checks if check.passed is False]
    assert clause in failed, str(report)
    with pytest.raises(EveryDepthError, match="breaks the contract"):
        report.raise_if_failed()


def test_a_frozen_block_is_reported_as_not_applicable() -> None:
    model, batch = ENTRIES["ViT"].make()
    model.requires_grad_(False)
    report = ed.check_stream(model, batch)
    checks = {check.name: check for check in report.checks}
    assert checks["gradient reaches every block"].passed is None
    assert report.ok


def test_a_cut_gradient_is_caught() -> None:
    model, batch = ENTRIES["ViT"].make()
    model.vit.layers[0].register_forward_hook(lambda _, __, output: output.detach())
    report = ed.check_stream(model, batch)
    assert "block 1 gets no gradient" in str(report)


def test_what_was_left_behind_is_named() -> None:
    model, batch = ENTRIES["ViT"].make()

    def forget(*_: Any) -> None:
        model.classifier.register_forward_hook(lambda *_: None)

    model.vit.embeddings.register_forward_hook(forget)
    report = ed.check_stream(model, batch)
    assert "changed: ['hooks']" in str(report)


def test_the_report_reads_as_a_table_and_the_mode_is_kept() -> None:
    model, batch = ENTRIES["GPT2-CausalLM-left"].make()
    model.train()
    text = str(ed.check_stream(model, batch))
    assert model.training
    assert text.startswith("GPT2LMHeadModel is a residual stream\nok   last depth is the model")
    assert "bit for bit, shape (3, 7, 60)" in text


def test_one_row_cannot_show_row_selection() -> None:
    model, batch = ENTRIES["ViT"].make()
    report = ed.check_stream(model, {"pixel_values": batch["pixel_values"][:1]})
    assert "the batch has one row; pass two or more" in str(report)
    assert torch.is_grad_enabled()


def test_the_clause_about_the_loss_does_not_apply_where_there_is_no_built_in_loss() -> None:
    several, batch = ENTRIES["Bert-SequenceClassification"].make()
    several.config.problem_type = "multi_label_classification"
    towers, pair = ENTRIES["CLIPModel-vision"].make()
    for model, given, options, labels in (
        (several, batch, {}, torch.ones(3, 3)),
        (towers, pair, {"tower": "vision"}, torch.zeros(3, dtype=torch.long)),
    ):
        report = ed.check_stream(model, {**given, "labels": labels}, **options)
        found = {check.name: check.passed for check in report.checks}
        assert report.ok, str(report)
        assert found["the loss is the model's own"] is None
