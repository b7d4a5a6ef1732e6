"""Identify the model a policy was calibrated on: its class, depth and weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from everydepth.stream import ResidualStream, unwrapped

# Entries of each tensor that are hashed; training changes all of them.
_SAMPLE = 16

_known: WeakKeyDictionary[nn.Module, tuple[object, str]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Equal for models with the same class, depth and weights, on any device."""

    name: str
    depth: int
    weights: str

    def __str__(self) -> str:
        return f"{self.name} with {self.depth} depths and weights {self.weights}"


def identity(stream: ResidualStream) -> Identity:
    """The identity of the model inside a stream."""
    return Identity(name=stream.name, depth=stream.depth, weights=_weights(unwrapped(stream.model)))


def _weights(model: nn.Module) -> str:
    named = [*model.named_parameters(), *model.named_buffers()]
    # Changes when a tensor is modified, replaced or moved; then the hash is computed again.
    state = tuple((id(t), t._version, t.data_ptr()) for _, t in named)
    known = _known.get(model)
    if known is not None and known[0] == state:
        return known[1]
    digest = hashlib.sha256()
    for name, tensor in named:
        sample = tensor.detach().flatten()[:: max(1, tensor.numel() // _SAMPLE)][:_SAMPLE]
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(sample.to("cpu", torch.float64).numpy().tobytes())
    _known[model] = (state, digest.hexdigest()[:16])
    return _known[model][1]
