"""Embeddings at every depth: a bare encoder, and one vector per sample from the tokens it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from everydepth.errors import SettingError
from everydepth.stream.block import Block
from everydepth.stream.contract import ResidualStream

Pool = Callable[[Tensor, Mapping[str, Any]], Tensor]


def _mask(tokens: Tensor, batch: Mapping[str, Any]) -> Tensor:
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape[:2]:
        return torch.ones(tokens.shape[:2], dtype=tokens.dtype, device=tokens.device)
    return mask.to(tokens)


def _mean(tokens: Tensor, batch: Mapping[str, Any]) -> Tensor:
    mask = _mask(tokens, batch)[..., None]
    return (tokens * mask).sum(1) / mask.sum(1).clamp(min=1e-9)


def _end(tokens: Tensor, batch: Mapping[str, Any], *, last: bool) -> Tensor:
    """The first or last real token, whichever side the padding is on."""
    real = _mask(tokens, batch)
    places = torch.arange(1, real.shape[1] + 1, device=real.device, dtype=real.dtype)
    score = places if last else real.shape[1] + 1 - places
    at = (score * real).argmax(1)
    return tokens[torch.arange(len(tokens), device=tokens.device), at]


POOLS: Mapping[str, Pool] = {
    "mean": _mean,
    "first": lambda tokens, batch: _end(tokens, batch, last=False),
    "last": lambda tokens, batch: _end(tokens, batch, last=True),
}


@final
class EmbeddingStream(ResidualStream):
    """Another stream whose prediction is the pooled vector of each sample, padding left out.

    of: a stream of the trunk, read out at every token. token: "mean", "first" or "last".
    """

    task = "embedding"

    def __init__(self, of: ResidualStream, token: str = "mean") -> None:
        if token not in POOLS:
            raise SettingError(f"token {token!r}; embeddings are pooled by {', '.join(POOLS)}")
        self.model, self.inputs = of.model, of.inputs
        self._of, self._pool, self._head = of, POOLS[token], nn.Identity()

    @property
    def blocks(self) -> Sequence[Block]:
        return self._of.blocks

    @property
    def head(self) -> nn.Module:
        return self._head

    def feature(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        return self._pool(self._of.readout(h, depth, batch), batch)

    def normed(self, feature: Tensor, depth: int) -> Tensor:
        return feature

    def call(self, arguments: Mapping[str, Any]) -> Any:
        tokens = self._of.prediction(self._of.call(arguments))
        if tokens.ndim != 3:
            raise SettingError(
                f"{self.name} predicts {tuple(tokens.shape)}, but an embedding is pooled from "
                "tokens; pass the encoder without its head (AutoModel)"
            )
        return self._pool(tokens, arguments)

    # -- the rest is that of the trunk ------------------------------------------------------------

    def arguments(self, batch: Mapping[str, Any], cache: Any) -> dict[str, Any]:
        return self._of.arguments(batch, cache)

    def truncated(self, depth: int, *, share: bool) -> nn.Module:
        return self._of.truncated(depth, share=share)

    def inserted(self, after: int, block: nn.Module, like: int, *, share: bool) -> nn.Module:
        return self._of.inserted(after, block, like, share=share)

    def block_like(self, number: int) -> nn.Module | None:
        return self._of.block_like(number)

    def after_block(self, h: Tensor, depth: int) -> Tensor:
        return self._of.after_block(h, depth)

    def between(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        return self._of.between(h, depth, batch)

    def silent(
        self, h: Tensor, number: int, run: Callable[[], Any], given: Mapping[str | int, Any]
    ) -> Any:
        return self._of.silent(h, number, run, given)

    def confirm(self, batch: Mapping[str, Any]) -> None:
        self._of.confirm(batch)

    @property
    def positions(self) -> int | None:
        return self._of.positions

    @property
    def heads(self) -> int | None:
        return self._of.heads

    def window(self, depth: int) -> int | None:
        return self._of.window(depth)
