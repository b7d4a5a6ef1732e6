"""`Structure`: what one batch revealed about a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everydepth.errors import UnsupportedModelError
from everydepth.stream.block import Block
from everydepth.stream.contract import Task
from everydepth.stream.discovery.readout import Parts, Pick
from everydepth.stream.discovery.recording import tensors_in
from everydepth.stream.discovery.tail import Tail

FAILURES = (
    RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError,
    ImportError,
)  # fmt: skip
"""What a model may raise on a batch it does not accept."""


@dataclass(frozen=True)
class Readout:
    """How a state becomes a prediction.

    how: "modules" if pick, norms and head are known; "head" if only the head is, and the tail
        computes its input; "tail" if the tail computes the prediction.
    picked: what `pick` does, in words. late: the model picks after its head.
    exact: the modules reproduce the model's own prediction bit for bit.
    """

    how: str
    head: nn.Module
    parts: Parts
    pick: Pick | None = None
    picked: str = ""
    late: bool = False
    exact: bool = False

    def read(self, h: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """The prediction, by the modules."""
        assert self.pick is not None
        x = h if self.late else self.pick(h, batch)
        for step in self.parts.before:
            x = step(x)
        x = self.head(x)
        return self.pick(x, batch) if self.late else x


@dataclass(frozen=True)
class Structure:
    """What one batch revealed about a model.

    missing: block (from 1) -> why its branches are unknown.
    others: the names of other chains in the model.
    idle: modules of the blocks' class in their lists that were not called.
    early: paths of residual blocks before the stream, from which the model reads more than one
        state.
    behind: norms with running statistics that are called after the last block.
    axis: the batch dimension of a state. padding: the batch key of its mask.
    outputs: numbers per prediction.
    batch: the batch that was run.
    """

    blocks: tuple[Block, ...]
    tail: Tail
    readout: Readout
    task: Task
    paths: tuple[str, ...]
    missing: Mapping[int, str]
    others: tuple[str, ...]
    idle: tuple[nn.Module, ...]
    early: tuple[str, ...]
    behind: tuple[nn.Module, ...]
    axis: int
    padding: str
    outputs: int
    batch: Mapping[str, Any]


def prediction_in(output: Any) -> Tensor:
    """The prediction in a model's output: its logits, or its first tensor of scores."""
    if isinstance(output, Tensor):
        return _scores([output])
    for name in ("logits", "prediction_logits", "logits_per_image"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    held = output if isinstance(output, (Mapping, tuple, list)) else getattr(output, "__dict__", {})
    return _scores(list(tensors_in(held)), f" in its {type(output).__name__}")


def _scores(tensors: Sequence[Tensor], where: str = "") -> Tensor:
    """The first tensor with numbers for every row, as a loss may come before it."""
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.ndim > 1:
            return tensor
    kinds = [f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors]
    raise UnsupportedModelError(
        f"the model returns {', '.join(kinds) or 'no tensors'}{where}, but a prediction is a float "
        "tensor (rows, ..., scores); let its forward return scores, such as logits, or one number "
        "per row as (rows, 1)"
    )


def text_config(model: nn.Module) -> Any:
    """The config of a model, or of its text part; None without one."""
    config = getattr(model, "config", None)
    own = getattr(config, "get_text_config", None)
    return config if own is None else own()


def can_cache(model: nn.Module, names: Collection[str], more: bool) -> bool:
    """Whether a model that takes arguments of these names, and perhaps more, may build a cache."""
    if "use_cache" in names:
        return True
    return more and getattr(text_config(model), "use_cache", None) is True


def path_of(model: nn.Module, step: Any) -> str:
    """The path of a module in the model, or the name of a function."""
    if not isinstance(step, nn.Module):
        return step.name
    return next((name for name, m in model.named_modules() if m is step), type(step).__name__)


def identical(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two predictions differ by no more than rounding."""
    if a.shape != b.shape:
        return False
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(b.dtype, 5e-2)
    scale = float(b.detach().float().nan_to_num().abs().max()) if b.numel() else 0.0
    gap = (a.float().nan_to_num() - b.float().nan_to_num()).abs()
    return not gap.numel() or float(gap.max()) <= tolerance * max(scale, 1e-3)
