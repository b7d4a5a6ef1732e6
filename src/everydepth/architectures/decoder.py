"""Declared so that `load` can cut a checkpoint it has not read: discovery must run the model first.

GPT-2, GPT-NeoX, OPT and the Llama kin: causal language models and sequence classifiers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from everydepth.errors import UnsupportedModelError
from everydepth.stream import BESIDE_INPUTS, Block, Branch, ResidualStream, sample_task, unwrapped


@final
class DecoderStream(ResidualStream):
    """Every token predicts the next one, or the last real token the class of the sequence."""

    inputs = ("input_ids", "inputs_embeds")

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._inner: Any = unwrapped(model)
        trunk: Any = self._inner.base_model
        self._trunk: Any = getattr(trunk, "decoder", trunk)  # OPT has one more level
        self._layers: nn.ModuleList = getattr(self._trunk, "h", None) or self._trunk.layers
        block = _BLOCKS.get(self._inner.config.model_type, _llama_block)
        self._blocks = tuple(block(layer) for layer in self._layers)
        classifier = getattr(self._inner, "score", None)
        self.task = "causal_lm" if classifier is None else sample_task(model)
        self._head: nn.Module = self._inner.lm_head if classifier is None else classifier
        names = ("norm", "ln_f", "final_layer_norm", "project_out")
        found = [getattr(self._trunk, name, None) for name in names]
        self._norms: list[nn.Module] = [module for module in found if module is not None]

    @property
    def blocks(self) -> Sequence[Block]:
        return self._blocks

    @property
    def head(self) -> nn.Module:
        return self._head

    def feature(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        if self.task == "causal_lm":
            return h
        return h[torch.arange(h.shape[0], device=h.device), self._last_token(batch)]

    def normed(self, feature: Tensor, depth: int) -> Tensor:
        for module in self._norms:
            feature = module(feature)
        return feature

    def readout(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        logits = self._head(self.normed(h, self.check_depth(depth)))
        # Classifiers score every token and pick afterwards; the last bits depend on it.
        return self.feature(logits, depth, batch)

    def arguments(self, batch: Mapping[str, Any], cache: Any) -> dict[str, Any]:
        # Without this the model would build and fill a cache of its own on every pass.
        kept = {key: value for key, value in batch.items() if key not in BESIDE_INPUTS}
        return {**kept, "past_key_values": cache, "use_cache": cache is not None}

    def new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._inner.config)

    @property
    def positions(self) -> int | None:
        return getattr(self._inner.config, "max_position_embeddings", None)

    def window(self, depth: int) -> int | None:
        config = self._inner.config
        kinds = getattr(config, "layer_types", None)
        slides = kinds is None or kinds[depth - 1] == "sliding_attention"
        return getattr(config, "sliding_window", None) if slides else None

    def inserted(self, after: int, block: nn.Module, like: int, *, share: bool) -> nn.Module:
        scaled = getattr(self._inner.config, "scale_attn_by_inverse_layer_idx", False)
        if scaled and after < self.depth:
            raise UnsupportedModelError(
                f"scale_attn_by_inverse_layer_idx divides the attention of a block of {self.name} "
                f"by its number, so a block after depth {after} would change those behind it; "
                f"insert after={self.depth}"
            )
        return super().inserted(after, block, like, share=share)

    def _last_token(self, batch: Mapping[str, Any]) -> Tensor | int:
        """The rightmost token that is not padding, for left and right padding alike."""
        ids, pad = batch.get("input_ids"), self._inner.config.pad_token_id
        if ids is None or pad is None:
            return -1
        positions = torch.arange(ids.shape[-1], device=ids.device, dtype=torch.int32)
        return (positions * (ids != pad).to(torch.int32)).argmax(-1)


def _pair(
    layer: nn.Module,
    attention: tuple[nn.Module, nn.Module, nn.Module],
    mlp: tuple[nn.Module, nn.Module, nn.Module],
    posts: tuple[nn.Module | None, nn.Module | None] = (None, None),
    *,
    parallel: bool = False,
    dropout: float = 0.0,
) -> Block:
    """A block of an attention and an MLP branch, each given as (entry, out, proj)."""
    branches = tuple(
        Branch(kind=kind, entry=parts[0], out=parts[1], proj=parts[2], post=post, dropout=dropout)
        for kind, parts, post in zip(("attention", "mlp"), (attention, mlp), posts, strict=True)
    )
    return Block(module=layer, branches=branches, parallel=parallel)


def _llama_block(layer: Any) -> Block:
    return _pair(
        layer,
        (layer.input_layernorm, layer.self_attn, layer.self_attn.o_proj),
        (layer.post_attention_layernorm, layer.mlp, layer.mlp.down_proj),
    )


def _gpt2_block(layer: Any) -> Block:
    return _pair(
        layer,
        (layer.ln_1, layer.attn, layer.attn.c_proj),
        (layer.ln_2, layer.mlp, layer.mlp.c_proj),
    )


def _neox_block(layer: Any) -> Block:
    return _pair(
        layer,
        (layer.input_layernorm, layer.post_attention_dropout, layer.attention.dense),
        (layer.post_attention_layernorm, layer.post_mlp_dropout, layer.mlp.dense_4h_to_h),
        parallel=layer.use_parallel_residual,
    )


def _opt_block(layer: Any) -> Block:
    attention, mlp = (layer.self_attn, layer.self_attn.out_proj), (layer.fc2, layer.fc2)
    norms = (layer.self_attn_layer_norm, layer.final_layer_norm)
    if layer.do_layer_norm_before:
        return _pair(layer, (norms[0], *attention), (norms[1], *mlp), dropout=layer.dropout)
    # The 350m model norms after the sum; its branches read the stream directly.
    entries = (layer.self_attn, *attention), (layer.fc1, *mlp)
    return _pair(layer, *entries, norms, dropout=layer.dropout)


_BLOCKS: Mapping[str, Callable[[Any], Block]] = {
    "gpt2": _gpt2_block,
    "gpt_neox": _neox_block,
    "opt": _opt_block,
}
