"""Eval mode, running statistics, packing and gradients as context managers."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from everydepth.errors import SettingError
from everydepth.stream.wrapping import unwrapped

if TYPE_CHECKING:
    from everydepth.stream.contract import ResidualStream


@contextmanager
def evaluating(model: nn.Module | ResidualStream) -> Generator[None, None, None]:
    """Put a model in eval mode inside the context, then restore each module's own mode."""
    inner = model if isinstance(model, nn.Module) else unwrapped(model.model)
    modes = [(module, module.training) for module in inner.modules()]
    inner.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def tracking(model: nn.Module) -> tuple[nn.Module, ...]:
    """The norms of a model that keep running statistics."""
    return tuple(m for m in model.modules() if getattr(m, "track_running_stats", False))


@contextmanager
def without_tracking(norms: Iterable[Any]) -> Generator[None, None, None]:
    """Leave the running statistics of these norms alone inside the context.

    In training mode they still compute with those of the batch.
    """
    changed = [(n, n.momentum) for n in norms if n.training and n.track_running_stats]
    for norm, _ in changed:
        # Instance norms update their statistics whatever the flag says, by this share.
        norm.track_running_stats, norm.momentum = False, 0.0
    try:
        yield
    finally:
        for norm, momentum in changed:
            norm.track_running_stats, norm.momentum = True, momentum


def packing(model: nn.Module) -> tuple[nn.TransformerEncoder, ...]:
    """The encoders of a model that may pack rows into nested tensors."""
    return tuple(m for m in model.modules() if isinstance(m, nn.TransformerEncoder))


@contextmanager
def without_packing(encoders: Iterable[nn.TransformerEncoder]) -> Generator[None, None, None]:
    """Keep padded rows as they are inside the context.

    Packed rows are nested tensors, which have no shape and few operations.
    """
    before = [(encoder, encoder.use_nested_tensor) for encoder in encoders]
    for encoder, _ in before:
        encoder.use_nested_tensor = False
    try:
        yield
    finally:
        for encoder, packs in before:
            encoder.use_nested_tensor = packs


@contextmanager
def requiring(parameters: Sequence[Tensor], wanted: bool) -> Generator[None, None, None]:
    """Set `requires_grad` inside the context; it was the opposite before."""
    for parameter in parameters:
        parameter.requires_grad_(wanted)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(not wanted)


@contextmanager
def as_written(model: nn.Module) -> Generator[None, None, None]:
    """Run torch's own attention and encoder layers by their Python code inside the context.

    In eval mode without gradients they use fused kernels, which round differently, unless somebody
    looks on: a hook, a mode. So a model would differ from itself.
    """
    inner = unwrapped(model)
    if not any(isinstance(module, _FUSING) for module in inner.modules()):
        yield
        return
    # Any mode keeps them from it, and this one does nothing else.
    with without_packing(packing(inner)), BaseTorchFunctionMode():
        yield


_FUSING = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


@contextmanager
def differentiating() -> Generator[None, None, None]:
    """Compute gradients inside the context, even within `torch.no_grad()`."""
    if torch.is_inference_mode_enabled():
        raise SettingError(
            "gradients are needed, but torch.inference_mode() is on, whose tensors can have none; "
            "call it outside, or inside torch.no_grad()"
        )
    with torch.enable_grad():
        yield
