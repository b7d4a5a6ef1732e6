"""What decides the outcome of a growth, and what is planned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from everydepth.config import Config, setting
from everydepth.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class GrowConfig(Config):
    """The settings of `grow`; resuming a run with others is an error.

    >>> ed.growth.GrowConfig(steps=50, trains="new").patience
    2
    """

    title: ClassVar[str] = "Growing"

    steps: int = setting(200, least=0, help="Training steps after each block.")
    rounds: int | None = setting(None, least=0, help="Most blocks to try.")
    max_depth: int | None = setting(None, least=1, help="Most blocks the result may have.")
    lr: float = setting(1e-3, above=0, help="Learning rate of AdamW, if no optimizer is given.")
    weight_decay: float = setting(0.0, least=0, help="Its weight decay.")
    batch_size: int = setting(32, least=1, help="Rows per step, for data that is not batched.")
    trains: str = setting(
        "all", choices=("all", "new"), help="all parameters, or those of the new block only."
    )
    precondition: bool = setting(
        True, help="Divide the first step of a block by the covariance of its features."
    )
    alpha: float = setting(0.05, above=0, below=1, help="Chance of a false 'deepen here'.")
    confidence: float = setting(
        0.95,
        above=0.5,
        below=1,
        help="Of the held-out interval that must lie above zero, for all rounds together.",
    )
    select: str = setting(
        "held-out",
        choices=("held-out", "paper"),
        help="What decides: rows used for nothing else, or, as in the paper, training loss.",
    )
    score_rows: int = setting(1024, least=8, help="Training rows to score sites by.")
    tries: int = setting(3, least=1, help="Sites whose first step is compared.")
    patience: int = setting(2, least=1, help="Refusals in a row after which growing ends.")
    seed: int = setting(0, least=0, help="Of new blocks and of the order of rows.")


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Config):
    """What a model is planned for: a number of parameters, or a training budget.

    >>> from everydepth.growth import PlanConfig
    >>> PlanConfig(parameters=7e9).multiple
    64
    """

    title: ClassVar[str] = "Planning"

    parameters: float | None = setting(
        None, above=0, help="Parameters of the model, for example 7e9."
    )
    flops: float | None = setting(None, above=0, help="Or a training budget in FLOPs.")
    tokens: float | None = setting(
        None, above=0, help="Tokens, if the data is fixed; by default compute-optimal."
    )
    multiple: int = setting(64, least=1, help="The width is rounded to a multiple of it.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.parameters is None) == (self.flops is None):
            raise SettingError(
                f"parameters={self.parameters} and flops={self.flops}; give one of the two"
            )
