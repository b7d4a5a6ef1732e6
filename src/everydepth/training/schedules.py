"""Learning rate schedules: pure functions of the step, so resuming needs no state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from everydepth.config import Config, brief, setting
from everydepth.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class Schedule(Config, ABC):
    """The learning rate at a step, as a multiple of `lr`."""

    @abstractmethod
    def factor(self, step: int, total_steps: int) -> float:
        """The multiple at `step` = 0 .. total_steps - 1."""


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """No change."""

    def factor(self, step: int, total_steps: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Half a cosine from 1 down to `final`."""

    final: float = setting(0.0, least=0)

    def factor(self, step: int, total_steps: int) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * step / total_steps)) / 2


@dataclass(frozen=True, kw_only=True)
class OneCycle(Schedule):
    """A cosine from `1 / start` up to 1 over the fraction `rise` of steps, then one down to
    `1 / (start * end)`. Momentum does not change."""

    rise: float = setting(0.3, least=0, most=1)
    start: float = setting(25.0, above=0)
    end: float = setting(1e4, above=0)

    def factor(self, step: int, total_steps: int) -> float:
        top = self.rise * total_steps - 1
        if step <= top:
            return _between(1 / self.start, 1.0, step / top if top else 1.0)
        return _between(1.0, 1 / (self.start * self.end), (step - top) / (total_steps - 1 - top))


@dataclass(frozen=True, kw_only=True)
class MultiStep(Schedule):
    """Multiplied by `gamma` at each of `milestones`, given as fractions of all steps."""

    milestones: tuple[float, ...] = (0.5, 0.75)
    gamma: float = setting(0.1, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= share <= 1 for share in self.milestones):
            raise SettingError(
                f"milestones={self.milestones}; use fractions of all steps, from 0 to 1: epoch 30 "
                "of 120 is 0.25"
            )

    def factor(self, step: int, total_steps: int) -> float:
        # 0.07 * 100 is a little more than 7.
        passed = [step >= share * total_steps - 1e-9 for share in self.milestones]
        return self.gamma ** sum(passed)


@dataclass(frozen=True, kw_only=True)
class Warmup(Schedule):
    """Linear warmup over the first `steps`, then the schedule `after` over the rest."""

    steps: int = setting(least=0)
    after: Any = setting()

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.after)

    def factor(self, step: int, total_steps: int) -> float:
        if step < self.steps:
            return (step + 1) / self.steps
        return self.after.factor(step - self.steps, max(total_steps - self.steps, 1))


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "constant": Constant(),
        "cosine": Cosine(),
        "one_cycle": OneCycle(),
        "multi_step": MultiStep(),
    }
)


def schedule_of(schedule: str | Schedule, warmup: float | int, total_steps: int) -> Schedule:
    """A schedule by name, or the given one, after `warmup` steps (below 1: a fraction of all)."""
    if isinstance(schedule, str):
        schedule = SCHEDULES[schedule]
    _check(schedule)
    if warmup >= 1 and warmup != int(warmup):
        raise SettingError(f"warmup={warmup}; use whole steps, or a fraction below 1")
    steps = min(round(warmup * total_steps), total_steps - 1) if warmup < 1 else int(warmup)
    found = Warmup(steps=steps, after=schedule) if steps else schedule
    part, left = found, total_steps
    while isinstance(part, Warmup):
        if part.steps >= left:
            raise SettingError(
                f"warmup steps: {part.steps}, training steps: {left}; use fewer warmup steps, or a "
                "fraction below 1"
            )
        part, left = part.after, left - part.steps
    return found


def _check(schedule: Any) -> None:
    if not callable(getattr(schedule, "factor", None)):
        raise SettingError(
            f"schedule={brief(schedule)}; use {', '.join(map(repr, SCHEDULES))}, a Schedule, or a "
            "torch scheduler together with its optimizer"
        )


def _between(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
