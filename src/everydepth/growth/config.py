"""What decides the outcome of a growth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from everydepth.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class GrowConfig:
    """The settings of `grow`; resuming a run with others is an error.

    steps: of training after each block. rounds, max_depth: when to stop at the latest.
    lr, weight_decay: of AdamW, where `grow` is given no optimizer.
    batch_size: of data that does not come in batches.
    trains: "all" parameters, or the "new" block only.
    precondition: whether the first step of a new block is divided by the features' covariance.
    alpha: the chance of a false "deepen here" anywhere in the model.
    confidence: of the held-out interval that must lie above zero.
    score_rows: training rows to score sites by. tries: sites whose first step is compared.
    patience: refusals in a row after which growing ends.

    >>> ed.growth.GrowConfig(steps=50, trains="new").patience
    2
    """

    steps: int = 200
    rounds: int | None = None
    max_depth: int | None = None
    lr: float = 1e-3
    weight_decay: float = 0.0
    batch_size: int = 32
    trains: Literal["all", "new"] = "all"
    precondition: bool = True
    alpha: float = 0.05
    confidence: float = 0.95
    score_rows: int = 1024
    tries: int = 3
    patience: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        lowest = {"batch_size": 1, "score_rows": 1, "tries": 1, "patience": 1, "max_depth": 1}
        for name, low in {**lowest, "steps": 0, "rounds": 0, "seed": 0}.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise SettingError(f"{name}={value}; use {low} or more")
        if self.trains not in ("all", "new"):
            raise SettingError(f"trains={self.trains!r}; use 'all' or 'new' (the new block only)")
        if not 0.5 < self.confidence < 1:
            raise SettingError(f"confidence={self.confidence}; use a share from 0.5 to below 1")
        if not 0 < self.alpha < 1:
            raise SettingError(f"alpha={self.alpha}; use a probability between 0 and 1")
        if self.lr <= 0 or self.weight_decay < 0:
            raise SettingError(
                f"lr={self.lr}, weight_decay={self.weight_decay}; use a learning rate above 0 and a "
                "decay of 0 or more"
            )
