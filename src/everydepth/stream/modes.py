"""Eval mode and gradients as context managers."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

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
