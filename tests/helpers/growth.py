"""Tiny models and labeled batches for growth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.zoo import MODELS, Entry
from torch import Tensor, nn

import everydepth as ed
from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig
from everydepth.growth import grow

# Detection has no labels of rows; RoBERTa and DistilBERT are built like BERT.
_LEFT_OUT = ("Roberta", "DistilBert", "Detr", "CLIPModel", "CLIPVision", "CLIPText")
GROWABLE = {
    name: entry
    for name, entry in MODELS.items()
    if not name.startswith(_LEFT_OUT) and "skips0" not in name and "MaskedLM" not in name
}
SETTINGS: dict[str, Any] = {
    "steps": 20,
    "rounds": 2,
    "batch_size": 64,
    "lr": 3e-3,
    "progress": False,
}


def labeled(
    entry: Entry, dtype: torch.dtype = torch.float64, copies: int = 4
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of an entry and a batch with random labels that fit it."""
    model, batch = entry.make(dtype)
    stream = ed.as_stream(model, **entry.options)
    batch = {key: torch.cat([value] * copies) for key, value in batch.items()}
    rows = len(next(iter(batch.values())))
    if stream.task == "causal_lm":
        batch["labels"] = batch["input_ids"]
    elif stream.task == "regression":
        batch["labels"] = torch.randn(rows, stream.classes, dtype=dtype)
    else:
        batch["labels"] = torch.randint(0, stream.classes, (rows,))
    return model, batch


def mlp(seed: int = 0, **config: Any) -> ResidualMLP:
    torch.manual_seed(seed)
    sizes = {"num_inputs": 6, "num_outputs": 3, "hidden_size": 12, "num_hidden_layers": 2}
    return ResidualMLP(ResidualMLPConfig(**{**sizes, "regression": False, **config})).eval()


def points(model: nn.Module, rows: int, seed: int = 0, scale: float = 1.0) -> dict[str, Tensor]:
    """Inputs, and classes drawn from the model's own prediction: no block can improve on it."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 6, generator=generator)
    with torch.no_grad():
        probabilities = (scale * model(inputs=inputs).logits).softmax(-1)
    labels = torch.multinomial(probabilities, 1, generator=generator).flatten()
    return {"inputs": inputs, "labels": labels}


def teacher_data(rows: int, seed: int) -> dict[str, Tensor]:
    return points(mlp(7, num_hidden_layers=4, hidden_size=24), rows, seed=seed, scale=6.0)


def long_growth(run: Path) -> nn.Module:
    settings = {**SETTINGS, "steps": 100, "rounds": 1}
    return grow(
        mlp(), teacher_data(512, 0), teacher_data(400, 1), **settings, run=run, resume=True
    ).model
