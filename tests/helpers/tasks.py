"""One small model and batch a task, and what is asked of it, worked out by hand in plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from tests.zoo import ENTRIES, PAD, ROWS, SIZES, TEXT, TOKENS, VOCABULARY
from torch import Tensor, nn

IGNORED = -100


@dataclass(frozen=True)
class Asked:
    """One prediction that counts: of which sample, where in it, and what it should say."""

    sample: int
    place: int | None
    label: Any
    is_number: bool = False

    def of(self, z: Tensor) -> Tensor:
        return z[self.sample] if self.place is None else z[self.sample, self.place]

    def loss(self, z: Tensor) -> float:
        """Squared error of numbers, cross-entropy of a class or of shares of classes."""
        own = self.of(z).double().tolist()
        if isinstance(self.label, list) and self.is_number:
            return sum((a - b) ** 2 for a, b in zip(own, self.label, strict=True)) / len(own)
        top = max(own)
        total = top + math.log(sum(math.exp(value - top) for value in own))
        if isinstance(self.label, list):
            return sum(y * (total - value) for y, value in zip(self.label, own, strict=True))
        return total - own[self.label]

    def differentiable(self, z: Tensor) -> Tensor:
        """The same by torch, for its gradient."""
        own = self.of(z)
        if self.is_number:
            return (own - own.new_tensor(self.label)).square().mean()
        if isinstance(self.label, list):
            return -(own.new_tensor(self.label) * own.log_softmax(-1)).sum()
        return -own.log_softmax(-1)[self.label]

    def hit(self, z: Tensor) -> bool:
        own = self.of(z).tolist()
        best = max(range(len(own)), key=own.__getitem__)
        label = self.label
        wanted = max(range(len(own)), key=label.__getitem__) if isinstance(label, list) else label
        return best == wanted


@dataclass(frozen=True)
class Case:
    """A task: model (float64, eval mode), batch, and the predictions that count."""

    name: str
    model: nn.Module
    batch: dict[str, Any]
    asked: list[Asked]
    options: dict[str, Any] = field(default_factory=dict)

    def mean_loss(self, z: Tensor) -> float:
        return sum(one.loss(z) for one in self.asked) / len(self.asked)

    def accuracy(self, z: Tensor) -> float:
        return sum(one.hit(z) for one in self.asked) / len(self.asked)


def case(name: str) -> Case:
    """A fresh one; the same every time."""
    torch.manual_seed(0)
    return CASES[name]()


def _made(entry: str) -> tuple[nn.Module, dict[str, Tensor]]:
    return ENTRIES[entry].make(torch.float64)


def _classification() -> Case:
    model, batch = _made("ViT")
    labels = torch.tensor([3, IGNORED, 7])
    asked = [Asked(0, None, 3), Asked(2, None, 7)]
    return Case("classification", model, {**batch, "labels": labels}, asked)


def _soft_labels() -> Case:
    model, batch = _made("ViT")
    labels = torch.rand(ROWS, 10, dtype=torch.float64).softmax(-1)
    asked = [Asked(i, None, row) for i, row in enumerate(labels.tolist())]
    return Case("soft labels", model, {**batch, "labels": labels}, asked)


def _regression() -> Case:
    model, batch = _made("ResidualMLP-norm1-skips1-regression1")
    labels = torch.randn(ROWS, 2, dtype=torch.float64)
    asked = [Asked(i, None, row, True) for i, row in enumerate(labels.tolist())]
    return Case("regression", model, {**batch, "labels": labels}, asked)


def _one_number() -> Case:
    # One output: Hugging Face's classifiers with num_labels=1 are regressions.
    config = hf.ViTConfig(**SIZES, image_size=32, patch_size=8, num_labels=1)
    model = hf.ViTForImageClassification(config).double().eval()
    batch = {"pixel_values": torch.randn(ROWS, 3, 32, 32, dtype=torch.float64)}
    labels = torch.tensor([0.5, -100.0, 2.0], dtype=torch.float64)  # -100 is a number here
    asked = [Asked(i, None, [value], True) for i, value in enumerate(labels.tolist())]
    return Case("one number", model, {**batch, "labels": labels}, asked)


def _tokens(mask: Tensor, labels: Tensor, shift: int) -> list[Asked]:
    """Position t is asked for the label of t + shift, if neither is padding, nor it ignored."""
    asked: list[Asked] = []
    for sample in range(labels.shape[0]):
        for place in range(labels.shape[1] - shift):
            said = place + shift
            real = mask[sample, place] and mask[sample, said]
            if real and labels[sample, said] != IGNORED:
                asked.append(Asked(sample, place, int(labels[sample, said])))
    return asked


def _labeled_text() -> Case:
    model, batch = _made("Llama-tied-CausalLM-left")
    labels = torch.randint(0, VOCABULARY, (ROWS, TOKENS))  # padding has labels, too
    labels[0, 2] = labels[1, 5] = IGNORED
    asked = _tokens(batch["attention_mask"], labels, 1)
    return Case("labeled text", model, {**batch, "labels": labels}, asked)


def _unlabeled_text() -> Case:
    model, batch = _made("GPT2-CausalLM-right")
    asked = _tokens(batch["attention_mask"], batch["input_ids"], 1)
    return Case("unlabeled text", model, batch, asked)


def _masked_text() -> Case:
    model, batch = _made("Bert-MaskedLM")
    labels = torch.full((ROWS, TOKENS), IGNORED)
    labels[:, ::2] = torch.randint(0, VOCABULARY, labels[:, ::2].shape)
    assert bool(((labels != IGNORED) & (batch["input_ids"] == PAD)).any())  # labeled padding
    asked = _tokens(batch["attention_mask"], labels, 0)
    return Case("masked text", model, {**batch, "labels": labels}, asked)


def _token_labels() -> Case:
    config = hf.BertConfig(**{**TEXT, "num_labels": 5})
    model = hf.BertForTokenClassification(config).double().eval()
    batch = ENTRIES["Bert-MaskedLM"].feed()
    labels = torch.randint(0, 5, (ROWS, TOKENS))
    labels[0, 0] = IGNORED
    asked = _tokens(batch["attention_mask"], labels, 0)
    options = {"blocks": "bert.encoder.layer", "readout": "classifier", "token": "all"}
    return Case("token labels", model, {**batch, "labels": labels}, asked, options)


def _detection() -> Case:
    model, batch = _made("Detr-plain")
    boxes = torch.rand(ROWS, 6, 4, dtype=torch.float64)
    return Case("detection", model, {**batch, "labels": boxes}, [])


def _embedding() -> Case:
    model, batch = _made("CLIPVision")
    return Case("embedding", model, {**batch, "labels": torch.zeros(ROWS)}, [])


CASES: Mapping[str, Callable[[], Case]] = {
    "classification": _classification,
    "soft labels": _soft_labels,
    "regression": _regression,
    "one number": _one_number,
    "labeled text": _labeled_text,
    "unlabeled text": _unlabeled_text,
    "masked text": _masked_text,
    "token labels": _token_labels,
    "detection": _detection,
    "embedding": _embedding,
}
WITH_A_LOSS = [name for name in CASES if name not in ("detection", "embedding")]
WITH_CLASSES = [name for name in WITH_A_LOSS if name not in ("regression", "one number")]
PER_TOKEN = ["labeled text", "unlabeled text", "masked text", "token labels"]
