"""Small models and labeled data that several tests of tracing share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers as hf
from torch import Tensor, nn

import everydepth as ed
from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig

CLASSES = 6


def vit(seed: int = 0, width: int = 32, layers: int = 3, scale: float = 5.0) -> nn.Module:
    """A ViT whose predictions differ between samples: a fresh one predicts one class for all."""
    torch.manual_seed(seed)
    config = hf.ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        num_labels=CLASSES,
    )
    model = hf.ViTForImageClassification(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "embeddings" not in name:
                parameter *= scale
    return model.eval()


def pictures(count: int = 60, seed: int = 1) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(count, 3, 16, 16, generator=random),
        "labels": torch.randint(0, CLASSES, (count,), generator=random),
    }


def gpt2(layers: int = 3, vocabulary: int = 40) -> nn.Module:
    torch.manual_seed(0)
    config = hf.GPT2Config(
        n_embd=32, n_layer=layers, n_head=4, vocab_size=vocabulary, n_positions=32
    )
    model = hf.GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "wpe" not in name:
                parameter *= 4
    return model.eval()


def sentences(count: int = 6, width: int = 9, vocabulary: int = 40) -> dict[str, Tensor]:
    """Rows of different lengths, padded on the right with a token that also occurs."""
    random = torch.Generator().manual_seed(3)
    ids = torch.randint(0, vocabulary, (count, width), generator=random)
    lengths = torch.arange(count) % 4 + width - 4
    mask = (torch.arange(width) < lengths[:, None]).long()
    ids = ids.masked_fill(mask == 0, 7)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def mlp(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return ResidualMLP(ResidualMLPConfig(**{"num_hidden_layers": 4, **changes})).eval()


def points(count: int = 50, outputs: int = 2) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(2)
    return {
        "inputs": torch.randn(count, 2, generator=random),
        "labels": torch.randn(count, outputs, generator=random),
    }


@torch.no_grad()
def features(model: nn.Module, batch: dict[str, Tensor]) -> np.ndarray:
    """(depth, row, dim) of one pass in float64, from the model's own states."""
    states = ed.as_stream(model).observe({k: v for k, v in batch.items() if k != "labels"})
    return np.stack([states.feature(i).double().numpy() for i in range(len(states))])


@torch.no_grad()
def logits(model: nn.Module, batch: dict[str, Tensor]) -> np.ndarray:
    """(depth, row, ..., class) of one pass, from the model's own states."""
    states = ed.as_stream(model).observe({k: v for k, v in batch.items() if k != "labels"})
    return np.stack([states.logits(i).double().numpy() for i in range(len(states))])
