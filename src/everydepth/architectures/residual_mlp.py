"""A residual MLP for small studies, optionally without skips, which discovery could not follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils.generic import ModelOutput

from everydepth.errors import SettingError
from everydepth.stream import Block, Branch, ResidualStream, unwrapped


class ResidualMLPConfig(PreTrainedConfig):
    """Sizes of a `ResidualMLP`.

    num_inputs, num_outputs: numbers per sample; hidden_size: width of the stream;
    intermediate_size: width inside a block (hidden_size if not given);
    norm: layer norm at the entry of each block and before the head;
    skips: False gives the same network without residual connections;
    regression: squared error instead of cross-entropy.
    """

    model_type = "everydepth_residual_mlp"

    def __init__(
        self,
        *,
        num_inputs: int = 2,
        num_outputs: int = 1,
        hidden_size: int = 30,
        num_hidden_layers: int = 6,
        intermediate_size: int | None = None,
        norm: bool = False,
        skips: bool = True,
        regression: bool = True,
        **kwargs: Any,
    ) -> None:
        sizes = {
            "num_inputs": num_inputs,
            "num_outputs": num_outputs,
            "hidden_size": hidden_size,
            "intermediate_size": hidden_size if intermediate_size is None else intermediate_size,
        }
        for name, size in sizes.items():
            if size < 1:
                raise SettingError(f"{name}={size}; use a whole number of 1 or more")
            setattr(self, name, size)
        self.num_hidden_layers = num_hidden_layers
        self.norm = norm
        self.skips = skips
        self.regression = regression
        super().__init__(**kwargs)


@dataclass
class ResidualMLPOutput(ModelOutput):
    """Loss if labels were given, and one row of numbers per sample."""

    loss: Tensor | None = None
    logits: Tensor | None = None


class ZeroSkip(nn.Module):
    """The skip of a network without skips."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class ResidualMLPBlock(nn.Module):
    """`x + W2 relu(W1 norm(x))`, or without `x`."""

    def __init__(self, config: ResidualMLPConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.norm = nn.LayerNorm(width) if config.norm else nn.Identity()
        self.fc1 = nn.Linear(width, inner)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(inner, width)
        self.skip = nn.Identity() if config.skips else ZeroSkip()

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.fc2(self.act(self.fc1(self.norm(x))))


class ResidualMLP(PreTrainedModel):
    """Linear embedding, residual blocks, linear readout."""

    config_class = ResidualMLPConfig
    main_input_name = "inputs"

    def __init__(self, config: ResidualMLPConfig) -> None:
        super().__init__(config)
        self.embed = nn.Linear(config.num_inputs, config.hidden_size)
        self.blocks = nn.ModuleList(
            ResidualMLPBlock(config) for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size) if config.norm else nn.Identity()
        self.head = nn.Linear(config.hidden_size, config.num_outputs)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.kaiming_uniform_(module.weight, a=5**0.5)
            bound = module.in_features**-0.5
            init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> ResidualMLPOutput:
        h = self.embed(inputs)
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        if labels is None:
            return ResidualMLPOutput(logits=logits)
        measure = nn.functional.mse_loss if self.config.regression else nn.functional.cross_entropy
        return ResidualMLPOutput(loss=measure(logits, labels), logits=logits)


@final
class ResidualMLPStream(ResidualStream):
    inputs = ("inputs",)

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._inner: Any = unwrapped(model)
        self.task = "regression" if self._inner.config.regression else "classification"
        self._blocks = tuple(_block(block) for block in self._inner.blocks)

    @property
    def blocks(self) -> Sequence[Block]:
        return self._blocks

    @property
    def head(self) -> nn.Module:
        return self._inner.head

    def feature(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        return h

    def normed(self, feature: Tensor, depth: int) -> Tensor:
        return self._inner.norm(feature)


def _block(block: Any) -> Block:
    skip = None if isinstance(block.skip, nn.Identity) else block.skip
    branch = Branch(kind="mlp", entry=block.norm, out=block.fc2, proj=block.fc2, skip=skip)
    return Block(module=block, branches=(branch,))
