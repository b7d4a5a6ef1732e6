"""Which of several outputs of a model is its prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from tests.zoo import TEXT
from torch import Tensor, nn

import everydepth as ed
from everydepth.errors import SettingError

WIDTH, CLASSES = 8, 5


class Attending(nn.Module):
    """Attention and an MLP; returns the state and the weights of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 12),
            nn.Linear(12, WIDTH),
        )
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        added, weights = self.attention(y, y, y)
        x = x + added
        return x + self.down(torch.tanh(self.up(x))), weights


class Seen(NamedTuple):
    """All that a model could return."""

    h: Tensor
    z: Tensor
    states: list[Tensor]
    weights: list[Tensor]
    early: list[Tensor]
    other: Tensor


class Several(nn.Module):
    """Returns what `answer` makes of its last state, its logits and the rest."""

    def __init__(self, answer: Callable[[Seen], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attending() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.other, self.answer = nn.Linear(WIDTH, 4), answer

    def forward(self, x: Tensor) -> Any:
        states: list[Tensor] = []
        weights: list[Tensor] = []
        for block in self.blocks:
            x, seen = block(x)
            states.append(x)
            weights.append(seen)
        h = self.norm(x)
        early = [self.head(self.norm(state).mean(1)) for state in states]
        z, other = self.head(h.mean(1)), self.other(h.mean(1))
        return self.answer(Seen(h, z, states, weights, early, other))


class Pair(NamedTuple):
    hidden: Tensor
    scores: Tensor


@torch.no_grad()
@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda s: (s.h, s.z), "1 (and not 0)"),
        (lambda s: (s.z, s.h), "0 (and not 1)"),
        (lambda s: {"trunk": s.h, "answer": s.z}, "answer (and not trunk)"),
        (lambda s: {"answer": s.z, "trunk": s.h}, "answer (and not trunk)"),
        (lambda s: (s.h, (s.z.sum(), {"q": s.z})), "1.1.q (and not 0)"),
        (lambda s: Pair(s.h, s.z), "scores (and not hidden)"),
        (lambda s: {"logits": s.z, "other": s.other}, "logits (and not other)"),
        (lambda s: (s.weights, s.z), "1 (and not 0.0, 0.1, 0.2)"),
        (lambda s: (s.z, s.weights), "0 (and not 1.0, 1.1, 1.2)"),
        (lambda s: (s.states, s.z), "1 (and not 0.0, 0.1, 0.2)"),
        (lambda s: [*s.states, s.h, s.z], "4 (and not 0, 1, 2, ...)"),
        (lambda s: (s.z.softmax(-1), s.z), "1 (and not 0)"),
        (lambda s: (s.z, s.z.softmax(-1)), "0 (and not 1)"),
        (lambda s: s.early, "2 (and not 0, 1)"),
        (lambda s: (s.z, s.z.clone()), "0 (and not 1)"),
    ],
)
def test_the_prediction_is_the_output_that_the_head_computes_last(answer: Any, told: str) -> None:
    torch.manual_seed(0)
    model, batch = Several(answer).eval(), {"x": torch.randn(3, 6, WIDTH)}
    stream = ed.as_stream(model, example=batch)
    report = ed.check_stream(stream, batch)
    assert report.ok, str(report)
    z = model.head(model.norm(stream.observe(batch)[3]).mean(1))
    assert torch.equal(stream.observe(batch).logits(3), z)
    assert f"  prediction: output {told}" in str(stream).splitlines()
    assert ed.as_stream(ed.at_depth(stream, 2)).outputs == CLASSES


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda s: (s.z, s.other), r"Several returns 2 .* prediction: '0' \(2, 5\), '1' \(2, 4\)"),
        (lambda s: {"a": s.other, "b": s.z, "c": s.h}, r"'a' \(2, 4\), 'b' \(2, 5\); choose one"),
        (lambda s: (s.h, s.h.mean(1)), r"'0' \(2, 6, 8\), '1' \(2, 8\); .*output='1'\)"),
    ],
    ids=["heads", "named", "pooled"],
)
def test_outputs_of_equal_right_are_named_and_one_is_asked_for(answer: Any, said: str) -> None:
    torch.manual_seed(0)
    model, batch = Several(answer).eval(), {"x": torch.randn(2, 6, WIDTH)}
    with pytest.raises(SettingError, match=said):
        ed.as_stream(model, example=batch)


@torch.no_grad()
@pytest.mark.parametrize("output", [0, 1, "0", "1"])
def test_one_of_several_outputs_can_be_chosen(output: int | str) -> None:
    torch.manual_seed(0)
    model, batch = Several(lambda s: (s.z, s.other)).eval(), {"x": torch.randn(2, 6, WIDTH)}
    stream = ed.as_stream(model, output=output, example=batch)
    assert ed.check_stream(stream, batch).ok
    assert torch.equal(stream.observe(batch).logits(3), model(**batch)[int(output)])
    assert ed.profile(stream, [{**batch, "labels": torch.tensor([1, 2])}], progress=False)
    with pytest.raises(SettingError, match=r"output=2, but Several returns 0, 1; use one of"):
        ed.as_stream(model, output=2, example=batch)


@torch.no_grad()
def test_of_named_blocks_the_prediction_is_what_the_readout_gives() -> None:
    torch.manual_seed(0)
    model, batch = Several(lambda s: (s.h, s.other, s.z)).eval(), {"x": torch.randn(2, 6, WIDTH)}
    stream = ed.as_stream(
        model, blocks="blocks", readout=lambda h: model.head(model.norm(h).mean(1))
    )
    assert stream.observe(batch).logits(3).shape == (2, CLASSES)


def test_what_a_stock_encoder_pools_is_beside_its_last_state() -> None:
    model = hf.BertModel(hf.BertConfig(**TEXT)).eval()
    stream = ed.as_stream(model)
    told = "  prediction: output last_hidden_state (and not pooler_output)"
    assert told in str(stream).splitlines()


def test_start_and_end_of_an_answer_are_two_predictions() -> None:
    model = hf.BertForQuestionAnswering(hf.BertConfig(**{**TEXT, "num_labels": 2})).eval()
    with pytest.raises(SettingError, match=r"'start_logits' \(2, 6\), 'end_logits' \(2, 6\)"):
        ed.as_stream(model).depth  # noqa: B018 - discovered when first needed
    assert ed.as_stream(model, output="end_logits").depth == 4
