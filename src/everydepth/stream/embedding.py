"""Embeddings at every depth: one vector per sample, pooled from the tokens of a bare encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from everydepth.errors import SettingError
from everydepth.stream.around import StreamAround
from everydepth.stream.contract import ResidualStream
from everydepth.stream.given import warn_of_padding

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
    """The first or last token that is not padding, on either side."""
    real = _mask(tokens, batch) != 0
    places = torch.arange(1, real.shape[1] + 1, device=real.device)
    score = places if last else real.shape[1] + 1 - places
    at = (score * real).argmax(1)
    return tokens[torch.arange(len(tokens), device=tokens.device), at]


POOLS: Mapping[str, Pool] = {
    "mean": _mean,
    "first": lambda tokens, batch: _end(tokens, batch, last=False),
    "last": lambda tokens, batch: _end(tokens, batch, last=True),
}


@final
class EmbeddingStream(StreamAround):
    """A stream that predicts one vector per sample, pooled over its real tokens.

    of: the stream of the encoder, which reads out every token. token: "mean", "first" or "last".
    """

    task = "embedding"

    def __init__(self, of: ResidualStream, token: str = "mean") -> None:
        if token not in POOLS:
            raise SettingError(f"token {token!r}; embeddings use one of {', '.join(POOLS)}")
        self.model, self.inputs, self.inner = of.model, of.inputs, of
        self._token, self._pool, self._head = token, POOLS[token], nn.Identity()

    @property
    def head(self) -> nn.Module:
        return self._head

    def feature(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        warn_of_padding(self, batch)
        return self._pool(self.inner.readout(h, depth, batch), batch)

    def normed(self, feature: Tensor, depth: int) -> Tensor:
        return feature

    def readout(self, h: Tensor, depth: int, batch: Mapping[str, Any]) -> Tensor:
        return self.feature(h, self.check_depth(depth), batch)

    def prediction(self, output: Any) -> Tensor:
        return output

    def account(self) -> Mapping[str, str]:
        which = "the mean of" if self._token == "mean" else f"the {self._token} of"
        return {**self.inner.account(), "readout": f"{which} the real tokens"}

    def call(self, arguments: Mapping[str, Any]) -> Any:
        tokens = self.inner.prediction(self.inner.call(arguments))
        if tokens.ndim != 3:
            raise SettingError(
                f"{self.name} predicts shape {tuple(tokens.shape)}, but an embedding is pooled "
                "from tokens; pass the encoder without its head (AutoModel)"
            )
        return self._pool(tokens, arguments)
