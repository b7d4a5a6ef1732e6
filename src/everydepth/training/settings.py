"""What a training is made of, checked before anything starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from everydepth.errors import SettingError
from everydepth.training.schedules import Schedule

_RATES = {"adamw": 1e-3, "adam": 1e-3, "sgd": 0.1}
_DECAYS = {"adamw": 0.01, "adam": 0.0, "sgd": 1e-4}


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stop after `patience` validations without a gain of more than `min_delta`.

    metric, depth: what must improve; "loss" falls, all others rise. The last depth by default.
    """

    patience: int = 5
    min_delta: float = 0.0
    metric: str = "loss"
    depth: int | None = None

    def __post_init__(self) -> None:
        if self.patience < 1 or self.min_delta < 0:
            raise SettingError(
                f"early stopping with patience={self.patience} and min_delta={self.min_delta}; "
                "use 1 or more validations and a min_delta of 0 or more"
            )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The part of a training that decides its outcome: resuming with others is an error."""

    epochs: int | None
    steps: int | None
    batch_size: int
    optimizer: Any
    lr: float | None
    schedule: Any
    warmup: float | int
    weight_decay: float | None
    grad_accumulation: int
    clip: float | None
    precision: str | None
    validate_every: int | None
    early_stopping: EarlyStopping | None
    shuffle: bool
    seed: int

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise SettingError(f"epochs={self.epochs} and steps={self.steps}; give one of the two")
        for name in ("epochs", "steps", "batch_size", "grad_accumulation", "validate_every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise SettingError(f"{name}={value!r}; use a whole number of 1 or more")
        for name, zero in (("lr", False), ("clip", False), ("weight_decay", True)):
            value = getattr(self, name)
            if value is not None and not (value > 0 or (zero and value == 0)):
                raise SettingError(f"{name}={value}; use a number above 0")
        if self.precision not in (None, "fp32", "bf16"):
            raise SettingError(f"precision {self.precision!r}; use 'fp32' or 'bf16'")
        if self.warmup < 0:
            raise SettingError(f"warmup={self.warmup}; use a number of steps or a share below 1")
        if self.seed < 0:
            raise SettingError(f"seed={self.seed}; use a whole number from 0 up")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def optimizer_of(
    optimizer: str | Optimizer, net: nn.Module, lr: float | None, weight_decay: float | None
) -> Optimizer:
    """The optimizer by name or itself.

    By name, weight decay leaves out biases and norms: everything with fewer than two dimensions.
    """
    if isinstance(optimizer, Optimizer):
        if lr is not None or weight_decay is not None:
            raise SettingError(
                "lr and weight_decay belong to the optimizer you pass; leave them out here"
            )
        return optimizer
    if optimizer not in _RATES:
        raise SettingError(
            f"optimizer {optimizer!r}; use one of {', '.join(_RATES)}, or an optimizer object"
        )
    parameters = [p for p in net.parameters() if p.requires_grad]
    if not parameters:
        raise SettingError("every parameter is frozen; let at least one require a gradient")
    rate = _RATES[optimizer] if lr is None else lr
    decay = _DECAYS[optimizer] if weight_decay is None else weight_decay
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if optimizer == "sgd":
        return SGD(groups, lr=rate, momentum=0.9)
    return (AdamW if optimizer == "adamw" else Adam)(groups, lr=rate)


def described(value: Any) -> Any:
    """An optimizer or schedule as JSON: names stay, objects give their class and settings."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Schedule):
        return {"name": type(value).__name__, **asdict(value)}
    if isinstance(value, Optimizer):
        plain = {
            k: v for k, v in value.defaults.items() if isinstance(v, (bool, int, float, str, tuple))
        }
        return {"object": type(value).__name__, **plain}
    return {"object": type(value).__name__}
