"""Networks and data that train in a moment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

import everydepth as ed
from everydepth.architectures.residual_mlp import ResidualMLP, ResidualMLPConfig
from everydepth.data import Points, load_digits
from everydepth.objectives import Objective


def mlp(seed: int = 0, blocks: int = 3, **config: Any) -> ResidualMLP:
    torch.manual_seed(seed)
    sizes = {"num_inputs": 4, "num_outputs": 2, "hidden_size": 8, "num_hidden_layers": blocks}
    return ResidualMLP(ResidualMLPConfig(**(sizes | config)))


def net(objective: Objective | None = None, **config: Any) -> ed.EveryDepth:
    return ed.EveryDepth(mlp(**config), objective or ed.lpa())


def points(rows: int = 64, seed: int = 0) -> Points:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 4, generator=generator)
    return Points(inputs, torch.stack([inputs.sum(1).sin(), inputs.prod(1)], 1))


def vit(seed: int = 0, dropout: float = 0.1) -> ViTForImageClassification:
    torch.manual_seed(seed)
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    config.num_labels = 10
    return ViTForImageClassification(config)


def gpt2() -> GPT2LMHeadModel:
    """Without dropout; 20 words, 8 positions."""
    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, **sizes, **dropout))


def digits(rows: int = 200, split: str = "train") -> Any:
    return load_digits(split).subset(range(rows))


def weights(network: torch.nn.Module) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in network.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
