"""Settings of `fit` and of the run directory, checked before training starts; needs no torch."""

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
    """Default learning rate and weight decay. states: numbers kept for each weight."""

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
    """Stop when a validation metric no longer improves."""

    patience: int = setting(5, least=1, help="Validations without improvement.")
    min_delta: float = setting(0.0, least=0, help="Smallest change that is an improvement.")
    metric: str = setting("loss", help="Metric that must improve.")
    depth: int | None = setting(None, least=1, help="Depth to watch; by default the last.")

    @classmethod
    def _label(cls) -> str:
        return "early stopping: "


@dataclass(frozen=True, kw_only=True)
class FitConfig(Config):
    """Settings of `fit` that affect its outcome; a run cannot be resumed with different ones.

    `optimizer` may also be a torch optimizer over `net.parameters()`. `schedule` may be a
    `Schedule`, or a torch scheduler of that optimizer, which is stepped after every training step.

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
        32, least=1, help="Rows per step, over all processes and accumulated pieces."
    )
    shuffle: bool = setting(True, help="Reshuffle the rows every epoch.")
    optimizer: Any = setting(
        "adamw",
        choices=tuple(OPTIMIZERS),
        also="an optimizer object",
        option=str,
        help="SGD uses momentum 0.9. Biases and norms get no weight decay.",
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
        help="Learning rate schedule.",
    )
    warmup: int | float = setting(
        0, least=0, option=float, help="Steps of linear warmup; below 1, a fraction of all steps."
    )
    grad_accumulation: int = setting(
        1, least=1, help="Split each batch into N pieces, to save memory."
    )
    clip: float | None = setting(None, above=0, help="Maximum norm of the gradient.")
    precision: str | None = setting(
        None,
        choices=("fp32", "bf16"),
        help="bf16 uses autocast; by default as set by accelerate launch.",
    )
    validate_every: int | None = setting(
        None, least=1, help="Steps between validations; by default one per epoch."
    )
    early_stopping: EarlyStopping | int | None = setting(
        None, least=1, option=int, help="Stop after N validations without improvement."
    )
    seed: int = setting(0, least=0, help="Seed of the row order and all other randomness.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.epochs is None) == (self.steps is None):
            raise SettingError(f"epochs={self.epochs} and steps={self.steps}; give one of the two")
        if isinstance(self.early_stopping, int):
            rule = EarlyStopping(patience=self.early_stopping)
            object.__setattr__(self, "early_stopping", rule)

    @property
    def rule(self) -> EarlyStopping | None:
        """The early stopping rule, or None."""
        return self.early_stopping if isinstance(self.early_stopping, EarlyStopping) else None

    def to_json(self) -> dict[str, Any]:
        """JSON values; objects are described by class and settings."""
        objects = {name: _described(getattr(self, name)) for name in ("optimizer", "schedule")}
        return {**plain(self), **objects}


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """Where a run is saved and how it is shown; none of it affects the outcome.

    run: the run directory; None writes nothing.
    compile: True, or the name of a `torch.compile` backend.
    trackers: names or accelerate trackers.

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
    keep: int = setting(2, least=1, help="Keep the last N checkpoints, and the best.")
    log_every: int = setting(10, least=1, help="Steps between logged metrics.")
    trackers: Any = setting(
        (),
        option=list[str],
        flags=("--tracker",),
        help="tensorboard, wandb or mlflow; repeatable.",
    )
    progress: bool = setting(True, help="Show a progress bar on a terminal.")
    compile: bool | str = setting(
        False, option=bool, flags=("--compile",), help="Compile every block with torch.compile."
    )
    workers: int = setting(0, least=0, hidden=True, help="Processes that load Dataset rows.")


def _described(value: Any) -> Any:
    """An optimizer or schedule as JSON: its name, or its class and settings."""
    if isinstance(value, str):
        return value
    name = type(value).__name__
    if is_dataclass(value) and not isinstance(value, type):
        return {"name": name, **asdict(value)}
    defaults: Mapping[str, Any] = getattr(value, "defaults", {})
    kept = {k: v for k, v in defaults.items() if isinstance(v, bool | int | float | str | tuple)}
    return {"object": name, **kept}
