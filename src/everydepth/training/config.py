"""What a run is asked to do, and where; checked before anything starts. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from everydepth.config import Config, plain, setting
from everydepth.errors import SettingError
from everydepth.training.schedules import SCHEDULES


class OptimizerDefaults(NamedTuple):
    """lr, weight_decay: by default. states: numbers it keeps for each weight."""

    lr: float
    weight_decay: float
    states: int


OPTIMIZERS: Mapping[str, OptimizerDefaults] = MappingProxyType(
    {
        "adamw": OptimizerDefaults(lr=1e-3, weight_decay=0.01, states=2),
        "adam": OptimizerDefaults(lr=1e-3, weight_decay=0.0, states=2),
        "sgd": OptimizerDefaults(lr=0.1, weight_decay=1e-4, states=1),
    }
)


def _defaults(name: str) -> str:
    return ", ".join(f"{key} {getattr(of, name):g}" for key, of in OPTIMIZERS.items())


@dataclass(frozen=True, kw_only=True)
class EarlyStopping(Config):
    """Stop after some validations without a gain; "loss" falls, all other metrics rise."""

    patience: int = setting(5, least=1, help="Validations without a gain.")
    min_delta: float = setting(0.0, least=0, help="A gain is more than this.")
    metric: str = setting("loss", help="What must improve.")
    depth: int | None = setting(None, least=1, help="At which depth; the last by default.")

    @classmethod
    def _label(cls) -> str:
        return "early stopping: "


@dataclass(frozen=True, kw_only=True)
class FitConfig(Config):
    """What decides the outcome of `fit`: to resume a run with other values is an error.

    optimizer and schedule may also be objects: an optimizer of `net.parameters()`, a `Schedule`, or
    a torch scheduler of that optimizer, which is stepped at every step.

    >>> from everydepth.training import FitConfig
    >>> config = FitConfig(epochs=3, lr=2e-3)
    >>> config.batch_size
    32
    """

    title: ClassVar[str] = "Training"

    epochs: int | None = setting(None, least=1, help="Passes over the data.")
    steps: int | None = setting(
        None, least=1, instead_of="epochs", help="Optimizer steps, instead of epochs."
    )
    batch_size: int = setting(
        32, least=1, help="Rows of one step, over all processes and pieces together."
    )
    shuffle: bool = setting(True, help="A new order of rows in every epoch, by the seed.")
    optimizer: Any = setting(
        "adamw",
        choices=tuple(OPTIMIZERS),
        also="an optimizer object",
        option=str,
        help="SGD has momentum .9; weight decay leaves out biases and norms.",
    )
    lr: float | None = setting(
        None, above=0, most=1e30, help=f"Learning rate; by default {_defaults('lr')}."
    )
    weight_decay: float | None = setting(
        None, least=0, most=1e6, help=f"By default {_defaults('weight_decay')}."
    )
    schedule: Any = setting(
        "cosine",
        choices=tuple(SCHEDULES),
        also="a Schedule, or a torch scheduler together with its optimizer",
        option=str,
        help="The learning rate over the steps.",
    )
    warmup: int | float = setting(
        0, least=0, option=float, help="Steps over which the rate rises; below 1, a share of all."
    )
    grad_accumulation: int = setting(1, least=1, help="Pieces of a batch, to save memory.")
    clip: float | None = setting(None, above=0, help="The largest norm of the gradient.")
    precision: str | None = setting(
        None,
        choices=("fp32", "bf16"),
        help="bf16 is autocast; by default what accelerate launch says.",
    )
    validate_every: int | None = setting(
        None, least=1, help="Steps; by default at the end of each epoch. The last step always is."
    )
    early_stopping: EarlyStopping | int | None = setting(
        None, least=1, option=int, help="Stop after N validations without a gain."
    )
    seed: int = setting(0, least=0, help="Of the order of rows, and of everything drawn.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.epochs is None) == (self.steps is None):
            raise SettingError(f"epochs={self.epochs} and steps={self.steps}; give one of the two")
        if isinstance(self.early_stopping, int):
            rule = EarlyStopping(patience=self.early_stopping)
            object.__setattr__(self, "early_stopping", rule)

    @property
    def rule(self) -> EarlyStopping | None:
        """When to stop early, if it is to."""
        return self.early_stopping if isinstance(self.early_stopping, EarlyStopping) else None

    def to_json(self) -> dict[str, Any]:
        """Plain values; of objects their class and settings."""
        objects = {name: _described(getattr(self, name)) for name in ("optimizer", "schedule")}
        return {**plain(self), **objects}


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """Where a run is kept and what is shown of it: nothing that changes its outcome.

    run: without it nothing is written.
    compile: True, or the name of a backend of `torch.compile`.
    trackers: names, or trackers of accelerate.

    >>> from everydepth.training import RunConfig
    >>> RunConfig(run="runs/one", keep=3).save_every is None
    True
    """

    title: ClassVar[str] = "Run"

    run: str | Path | None = setting(
        None,
        option=Path,
        flags=("--run", "-o"),
        help="The run directory: config, metrics, checkpoints, results, model.",
    )
    resume: bool = setting(
        False,
        flags=("--resume",),
        help="Continue the run exactly where its last checkpoint left off, or start it.",
    )
    save_every: int | None = setting(
        None, least=1, help="Steps between checkpoints; by default at the end of each epoch."
    )
    keep: int = setting(2, least=1, help="How many of the last checkpoints stay, beside the best.")
    log_every: int = setting(10, least=1, help="Steps between lines of metrics.")
    trackers: Any = setting(
        (),
        option=list[str],
        flags=("--tracker",),
        help="tensorboard, wandb or mlflow; may be repeated.",
    )
    progress: bool = setting(True, help="Show a bar, on a terminal.")
    compile: bool | str = setting(
        False, option=bool, flags=("--compile",), help="Compile every block with torch.compile."
    )
    workers: int = setting(0, least=0, hidden=True, help="Processes that load rows of a Dataset.")


def _described(value: Any) -> Any:
    """An optimizer or schedule as JSON: names stay, objects give their class and settings."""
    if isinstance(value, str):
        return value
    name = type(value).__name__
    if is_dataclass(value) and not isinstance(value, type):
        return {"name": name, **asdict(value)}
    defaults: Mapping[str, Any] = getattr(value, "defaults", {})
    kept = {k: v for k, v in defaults.items() if isinstance(v, bool | int | float | str | tuple)}
    return {"object": name, **kept}
