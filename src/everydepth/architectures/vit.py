"""Declared so that `load` can cut a checkpoint it has not read: discovery must run the model first.

ViT, DeiT and BEiT for image classification: the class token (or the mean patch) predicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn

from everydepth.stream import Block, Branch, ResidualStream, sample_task, unwrapped


@final
class VisionTransformerStream(ResidualStream):
    """Pre-norm blocks; one dropout (ViT, DeiT) or drop path (BEiT) serves both branches."""

    inputs = ("pixel_values",)

    def __init__(self, model: nn.Module) -> None:
        self.model, self.task = model, sample_task(model)
        self._inner: Any = unwrapped(model)
        self._trunk: Any = self._inner.base_model
        self._blocks = tuple(_block(layer) for layer in self._trunk.layers)
        # BEiT with mean pooling norms the mean of the patches; all others norm, then pick.
        pooler = getattr(self._trunk, "pooler", None)
        self._mean_norm: nn.Module | None = getattr(pooler, "layernorm", None)

    @property
    def blocks(self) -> Sequence[Block]:
        return self._blocks

    @property
    def head(self) -> nn.Module:
        return self._inner.classifier

    def feature(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        return h[:, 0] if self._mean_norm is None else h[:, 1:].mean(1)

    def normed(self, feature: Tensor, depth: int) -> Tensor:
        return (
            self._trunk.layernorm(feature) if self._mean_norm is None else self._mean_norm(feature)
        )

    def inserted(self, after: int, block: nn.Module, like: int, *, share: bool) -> nn.Module:
        grown: Any = super().inserted(after, block, like, share=share)
        _set_drop_paths(list(grown.base_model.layers), grown.config)
        return grown


def _set_drop_paths(layers: list[Any], config: Any) -> None:
    """Rates that rise from 0 to the config's over the blocks, as BEiT itself sets them."""
    paths = [getattr(layer, "drop_path", None) for layer in layers]
    kind: Any = next((type(path) for path in paths if hasattr(path, "drop_prob")), None)
    if kind is not None:
        for index, layer in enumerate(layers):
            rate = config.drop_path_rate * index / max(len(layers) - 1, 1)
            path: nn.Module = kind(rate) if rate > 0 else nn.Identity()
            layer.drop_path = path.train(layer.training)


def _block(layer: Any) -> Block:
    out = getattr(layer, "drop_path", layer.dropout)
    return Block(
        module=layer,
        branches=(
            Branch(
                kind="attention",
                entry=layer.layernorm_before,
                out=out,
                proj=layer.attention.o_proj,
            ),
            Branch(kind="mlp", entry=layer.layernorm_after, out=out, proj=layer.mlp.fc2, call=1),
        ),
    )
