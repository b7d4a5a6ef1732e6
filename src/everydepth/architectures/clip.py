"""CLIP: a forward pass does not show which of its two towers is wanted.

Each is a stream that ends in the shared embedding space.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from everydepth.errors import SettingError
from everydepth.stream import Block, Branch, ResidualStream, unwrapped

Tower = Literal["vision", "text"]


@final
class ClipStream(ResidualStream):
    """One tower. `CLIPModel` has two: use `as_stream(model, tower="vision")` or `"text"`."""

    task = "embedding"

    def __init__(self, model: nn.Module, *, tower: Tower | None = None) -> None:
        self.model = model
        self._inner: Any = unwrapped(model)
        towers: tuple[Tower, Tower] = ("vision", "text")
        has: list[Tower] = [t for t in towers if hasattr(self._inner, f"{t}_model")]
        if tower is None and len(has) == 1:
            tower = has[0]
        if tower not in has:
            raise SettingError(
                f"tower={tower!r}, but {type(self._inner).__name__} has {' and '.join(has)}; "
                f"use as_stream(model, tower={has[0]!r})"
            )
        self._tower: Tower = tower
        self._both = len(has) == 2
        self._trunk: Any = getattr(self._inner, f"{tower}_model")
        self.inputs = ("pixel_values",) if tower == "vision" else ("input_ids",)
        self._blocks = tuple(_block(layer) for layer in self._trunk.encoder.layers)

    @property
    def blocks(self) -> Sequence[Block]:
        return self._blocks

    @property
    def head(self) -> nn.Module:
        name = "visual_projection" if self._tower == "vision" else "text_projection"
        return getattr(self._inner, name)

    def feature(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        if self._tower == "vision":
            return h[:, 0]
        return h[torch.arange(h.shape[0], device=h.device), self._end_of_text(batch["input_ids"])]

    def normed(self, feature: Tensor, depth: int) -> Tensor:
        if self._tower == "vision":
            return self._trunk.post_layernorm(feature)
        return self._trunk.final_layer_norm(feature)

    def call(self, arguments: Mapping[str, Any]) -> Any:
        if not self._both:
            return self.model(**arguments)
        text = {"input_ids", "attention_mask", "position_ids"}
        mine = {k: v for k, v in arguments.items() if (k in text) == (self._tower == "text")}
        vision = self._tower == "vision"
        inner = self._inner
        return (inner.get_image_features if vision else inner.get_text_features)(**mine)

    def prediction(self, output: Any) -> Tensor:
        if self._both:
            return output.pooler_output
        return output.image_embeds if self._tower == "vision" else output.text_embeds

    def _end_of_text(self, ids: Tensor) -> Tensor:
        end = self._trunk.eos_token_id
        # Old configs have a wrong end token, 2; there the largest id is the end.
        return ids.argmax(-1) if end == 2 else (ids == end).int().argmax(-1)


def _block(layer: Any) -> Block:
    return Block(
        module=layer,
        branches=(
            Branch(
                kind="attention",
                entry=layer.layer_norm1,
                out=layer.self_attn,
                proj=layer.self_attn.out_proj,
            ),
            Branch(kind="mlp", entry=layer.layer_norm2, out=layer.mlp, proj=layer.mlp.fc2),
        ),
    )
