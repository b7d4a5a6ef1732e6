"""DETR: a forward pass does not show that both of its heads, classes and boxes, predict.

The stream of object queries runs through the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn

from everydepth.errors import UnsupportedModelError
from everydepth.stream import Block, Branch, ResidualStream, unwrapped


@final
class DetrStream(ResidualStream):
    """Post-norm decoder layers with three branches; backbone and encoder are the embedding."""

    inputs = ("pixel_values",)
    task = "detection"

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._inner: Any = unwrapped(model)
        self._decoder: Any = self._inner.model.decoder
        self._blocks = tuple(_block(layer) for layer in self._decoder.layers)

    @property
    def blocks(self) -> Sequence[Block]:
        return self._blocks

    @property
    def head(self) -> nn.Module:
        return self._inner.class_labels_classifier

    def feature(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        return h

    def normed(self, feature: Tensor, depth: int) -> Tensor:
        return self._decoder.layernorm(feature)

    def extras(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        return {"pred_boxes": self._inner.bbox_predictor(self.normed(h, depth)).sigmoid()}

    def inserted(self, after: int, block: nn.Module, like: int, *, share: bool) -> nn.Module:
        if self._inner.config.auxiliary_loss:
            raise UnsupportedModelError(
                f"with auxiliary_loss, {self.name} normalizes the state after every block, so a "
                "new block would change the function; load it with auxiliary_loss=False"
            )
        return super().inserted(after, block, like, share=share)

    def after_block(self, h: Tensor, depth: int) -> Tensor:
        # With auxiliary losses, the decoder normalizes the stream itself after every layer.
        return self._decoder.layernorm(h) if self._inner.config.auxiliary_loss else h


def _block(layer: Any) -> Block:
    return Block(
        module=layer,
        branches=(
            Branch(
                kind="attention",
                entry=layer.self_attn,
                out=layer.self_attn,
                proj=layer.self_attn.o_proj,
                post=layer.self_attn_layer_norm,
                dropout=layer.dropout,
            ),
            Branch(
                kind="cross_attention",
                entry=layer.encoder_attn,
                out=layer.encoder_attn,
                proj=layer.encoder_attn.o_proj,
                post=layer.encoder_attn_layer_norm,
                dropout=layer.dropout,
            ),
            Branch(
                kind="mlp",
                entry=layer.mlp,
                out=layer.mlp,
                proj=layer.mlp.fc2,
                post=layer.final_layer_norm,
            ),
        ),
    )
