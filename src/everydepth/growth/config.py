"""The settings of `grow` and of `plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from everydepth.config import Config, setting
from everydepth.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class GrowConfig(Config):
    """The settings of `grow`; resuming a run with different ones is an error.

    >>> ed.growth.GrowConfig(steps=50, trains="new").patience
    2
    """

    title: ClassVar[str] = "Growing"

    steps: int = setting(200, least=0, help="Training steps after each block.")
    rounds: int | None = setting(None, least=0, help="Maximum number of blocks to try.")
    max_depth: int | None = setting(None, least=1, help="Maximum depth of the result.")
    lr: float = setting(
        1e-3, above=0, most=1e30, help="Learning rate of AdamW, if no optimizer is given."
    )
    weight_decay: float = setting(0.0, least=0, most=1e6, help="Weight decay of AdamW.")
    batch_size: int = setting(32, least=1, help="Rows per step, for data that is not batched.")
    trains: str = setting(
        "all", choices=("all", "new"), help="all: every parameter. new: only the new block's."
    )
    precondition: bool = setting(
        True, help="Divide a block's first step by the covariance of its features."
    )
    alpha: float = setting(0.05, above=0, below=1, help="Chance of a false 'deepen here'.")
    confidence: float = setting(
        0.95,
        above=0.5,
        below=1,
        help="Confidence that held-out loss improved, over all rounds together.",
    )
    select: str = setting(
        "held-out",
        choices=("held-out", "paper"),
        help="Decide by held-out rows, or by training loss as in the paper.",
    )
    score_rows: int = setting(1024, least=8, help="Training rows used to score sites.")
    tries: int = setting(3, least=1, help="Sites whose first step is compared.")
    patience: int = setting(2, least=1, help="Stop after this many rejections in a row.")
    seed: int = setting(0, least=0, help="Seed for new blocks and row order.")


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Config):
    """The settings of `plan`: a number of parameters or a training budget.

    >>> from everydepth.growth import PlanConfig
    >>> PlanConfig(parameters=7e9).multiple
    64
    """

    title: ClassVar[str] = "Planning"

    parameters: float | None = setting(
        None, least=1, most=1e30, help="Number of parameters, for example 7e9."
    )
    flops: float | None = setting(
        None, least=1, most=1e60, help="Training budget in FLOPs, instead."
    )
    tokens: float | None = setting(
        None, least=1, most=1e30, help="Training tokens, if fixed; compute-optimal by default."
    )
    multiple: int = setting(64, least=1, help="Round the width to a multiple of this.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.parameters is None) == (self.flops is None):
            raise SettingError(
                f"parameters={self.parameters} and flops={self.flops}; give one of the two"
            )
