"""Optimizers by name."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer

from everydepth.config import brief
from everydepth.errors import SettingError
from everydepth.training.config import OPTIMIZERS


def check_own(optimizer: Optimizer, net: nn.Module) -> None:
    """Raise if an optimizer has parameters of another network."""
    own = {id(p) for p in net.parameters()}
    theirs = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if foreign := sum(parameter not in own for parameter in theirs):
        raise SettingError(
            f"{foreign} of the optimizer's {len(theirs)} parameters do not belong to the network; "
            "build it from net.parameters()"
        )


def optimizer_of(
    optimizer: str | Optimizer, net: nn.Module, lr: float | None, weight_decay: float | None
) -> Optimizer:
    """An optimizer by name, or the given one.

    By name, parameters with fewer than two dimensions (biases and norms) get no weight decay.
    """
    half = sum(p.requires_grad and p.dtype == torch.float16 for p in net.parameters())
    if half:
        raise SettingError(
            f"{half} parameters that would learn are float16, in which small gradients and steps "
            'vanish; call model.float() first, and use precision="bf16" for speed'
        )
    if isinstance(optimizer, Optimizer):
        if lr is not None or weight_decay is not None:
            raise SettingError(
                "lr and weight_decay belong to the optimizer you pass; leave them out here"
            )
        check_own(optimizer, net)
        if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
            raise SettingError(
                "every parameter of the optimizer is frozen; let at least one require a gradient"
            )
        if isinstance(optimizer, LBFGS):
            raise SettingError(
                "LBFGS computes the loss several times per step, which fit does once; use another "
                "optimizer, or your own loop"
            )
        return optimizer
    parameters = [p for p in net.parameters() if p.requires_grad]
    if not parameters:
        raise SettingError("every parameter is frozen; let at least one require a gradient")
    if not isinstance(optimizer, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SettingError(
            f"optimizer={brief(optimizer)}; use one of {', '.join(OPTIMIZERS)}, or an optimizer "
            "object"
        )
    defaults = OPTIMIZERS[optimizer]
    rate = defaults.lr if lr is None else lr
    decay = defaults.weight_decay if weight_decay is None else weight_decay
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if optimizer == "sgd":
        return SGD(groups, lr=rate, momentum=0.9)
    return (AdamW if optimizer == "adamw" else Adam)(groups, lr=rate)
