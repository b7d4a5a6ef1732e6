"""Declared so that `load` can cut a checkpoint it has not read: discovery must run the model first.

BERT, RoBERTa and DistilBERT: post-norm blocks, `after = norm(x + out)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from everydepth.errors import UnsupportedModelError
from everydepth.stream import Block, Branch, ResidualStream, sample_task, unwrapped


@final
class EncoderStream(ResidualStream):
    """Sequence classification from the first token, masked language modelling from every token."""

    inputs = ("input_ids", "inputs_embeds")

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._inner: Any = unwrapped(model)
        if getattr(self._inner.config, "chunk_size_feed_forward", 0):
            raise UnsupportedModelError(
                f"chunk_size_feed_forward is {self._inner.config.chunk_size_feed_forward}, which "
                "runs one residual connection in pieces; load the model with 0"
            )
        trunk: Any = self._inner.base_model
        distil = hasattr(trunk, "transformer")
        self._layers: nn.ModuleList = (trunk.transformer if distil else trunk.encoder).layer
        self._blocks = tuple((_distil_block if distil else _block)(layer) for layer in self._layers)
        self._per_token = self._inner.get_output_embeddings() is not None
        self.task = "masked_lm" if self._per_token else sample_task(model)
        readout = _masked_readout if self._per_token else _sequence_readout
        self._norm, self._head = readout(self._inner)

    @property
    def blocks(self) -> Sequence[Block]:
        return self._blocks

    @property
    def head(self) -> nn.Module:
        return self._head

    def feature(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        return h if self._per_token else h[:, 0]

    def normed(self, feature: Tensor, depth: int) -> Tensor:
        return self._norm(feature)


def _block(layer: Any) -> Block:
    attention, mlp = layer.attention.output, layer.output
    return Block(
        module=layer,
        branches=(
            Branch(
                kind="attention",
                entry=layer.attention.self,
                out=attention.dropout,
                proj=attention.dense,
                post=attention.LayerNorm,
            ),
            Branch(
                kind="mlp",
                entry=layer.intermediate,
                out=mlp.dropout,
                proj=mlp.dense,
                post=mlp.LayerNorm,
            ),
        ),
    )


def _distil_block(layer: Any) -> Block:
    return Block(
        module=layer,
        branches=(
            Branch(
                kind="attention",
                entry=layer.attention,
                out=layer.attention,
                proj=layer.attention.out_lin,
                post=layer.sa_layer_norm,
            ),
            Branch(
                kind="mlp",
                entry=layer.ffn,
                out=layer.ffn,
                proj=layer.ffn.lin2,
                post=layer.output_layer_norm,
            ),
        ),
    )


Readout = tuple[Callable[[Tensor], Tensor], nn.Module]


def _masked_readout(model: Any) -> Readout:
    """The transform before the vocabulary, and the vocabulary's linear map."""
    if hasattr(model, "cls"):
        return model.cls.predictions.transform, model.cls.predictions.decoder
    if hasattr(model, "lm_head"):
        head = model.lm_head
        gelu = nn.functional.gelu
        return lambda x: head.layer_norm(gelu(head.dense(x))), head.decoder
    return (
        lambda x: model.vocab_layer_norm(model.activation(model.vocab_transform(x))),
        model.vocab_projector,
    )


def _sequence_readout(model: Any) -> Readout:
    """The pooler of the first token, and the classifier."""
    if hasattr(model, "pre_classifier"):
        return lambda x: model.dropout(torch.relu(model.pre_classifier(x))), model.classifier
    if hasattr(model.classifier, "out_proj"):
        head = model.classifier
        return lambda x: head.dropout(torch.tanh(head.dense(head.dropout(x)))), head.out_proj
    pooler = model.base_model.pooler
    return lambda x: model.dropout(pooler.activation(pooler.dense(x))), model.classifier
