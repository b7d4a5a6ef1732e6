"""Measure the time and memory of one training step on this machine."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everydepth.stream import differentiating, with_labels
from everydepth.stream.rows import pick_rows
from everydepth.training.config import OPTIMIZERS
from everydepth.training.module import EveryDepth


@dataclass(frozen=True, kw_only=True)
class Cost:
    """seconds: of one step. memory: bytes of weights, gradients, optimizer and activations."""

    seconds: float
    memory: int
    activations: int


def cost_of(
    net: EveryDepth, batch: Mapping[str, Any], *, optimizer: str = "adamw", pieces: int = 1
) -> Cost:
    """Time a forward and backward pass of one batch, and count the bytes saved for backward."""
    net = copy.deepcopy(net).train()
    net.set_progress(0, 1)
    size = net.stream.rows(batch)
    rows = pick_rows(with_labels(net.stream, batch), slice(0, max(1, size // pieces)), size)
    piece = {key: v.clone() if isinstance(v, Tensor) else v for key, v in rows.items()}
    own = {t.untyped_storage().data_ptr() for t in (*net.parameters(), *net.buffers())}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with differentiating():
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            first = net(**piece)
        first.loss.backward()  # also warms up the timed pass
        start = time.perf_counter()
        net(**piece).loss.backward()
    seconds = (time.perf_counter() - start) * pieces
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    trained = sum(p.numel() * p.element_size() for p in net.parameters() if p.requires_grad)
    activations = sum(saved.values())
    states = trained * (1 + OPTIMIZERS[optimizer].states)  # gradients and optimizer states
    return Cost(seconds=seconds, memory=weights + states + activations, activations=activations)
