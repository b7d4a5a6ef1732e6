"""Schedules: how the weights of depths change over training."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

import numpy as np

from everydepth.config import setting
from everydepth.errors import SettingError
from everydepth.objectives.moment import Moment
from everydepth.objectives.part import Part


class Stage(IntEnum):
    """The order in which schedules are applied, regardless of how they are given.

    Normalizing needs the final proportions, and sampling the final weights.
    """

    CHOOSE = 10
    RISE = 20
    FALL = 30
    NORMALIZE = 40
    DRAW = 50


@dataclass(frozen=True, kw_only=True)
class WeightSchedule(Part):
    """Maps weights to weights, depending on the step; `order` is a `Stage`."""

    @abstractmethod
    def __call__(self, weights: np.ndarray, moment: Moment) -> np.ndarray:
        """The new weights of depths 0..L; `weights` may be changed in place."""

    def period(self, depth: int) -> int:
        """The number of steps after which it repeats."""
        return 1

    def repeats(self, depth: int) -> int:
        """The number of periods after which every depth has had its turn, almost surely."""
        return 1


@dataclass(frozen=True, kw_only=True)
class Alternating(WeightSchedule, name="alternating"):
    """Odd steps train the last depth only (Tracing Representations)."""

    order: ClassVar[int] = Stage.CHOOSE

    def __call__(self, weights: np.ndarray, moment: Moment) -> np.ndarray:
        if moment.step % 2 == 1:
            weights[:-1], weights[-1] = 0.0, 1.0
        return weights

    def period(self, depth: int) -> int:
        return 2


@dataclass(frozen=True, kw_only=True)
class Rotational(WeightSchedule, name="rotational"):
    """Below L, train only depths with `(l - step) % every == 0` (LayerSkip)."""

    order: ClassVar[int] = Stage.CHOOSE
    every: int = setting(4, least=1, help="Each depth has its turn every N steps.")

    def __call__(self, weights: np.ndarray, moment: Moment) -> np.ndarray:
        l = np.arange(moment.depth)  # noqa: E741 (the paper's name of a depth)
        weights[:-1] *= (l - moment.step) % self.every == 0
        return weights

    def period(self, depth: int) -> int:
        return self.every


@dataclass(frozen=True, kw_only=True)
class Gradual(WeightSchedule, name="gradual"):
    """Start with depth L alone and add one depth every `total / 2L` steps, the deepest first.

    LayerSkip's other curriculum.
    """

    order: ClassVar[int] = Stage.CHOOSE

    def __call__(self, weights: np.ndarray, moment: Moment) -> np.ndarray:
        added = math.floor(moment.progress * 2 * moment.depth)
        weights[:-1] *= np.arange(moment.depth) >= moment.depth - added
        return weights

    @property
    def needs_total(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class WarmedUp(WeightSchedule, name="warmed_up"):
    """Weights below the last depth rise linearly from `start` of their value to the full value."""

    order: ClassVar[int] = Stage.RISE
    over: float = setting(0.1, least=0, below=1, help="Share of training it takes.")
    start: float = setting(0.0, least=0, help="Initial share of the weights.")

    def __call__(self, weights: np.ndarray, moment: Moment) -> np.ndarray:
        if self.over:
            share = min(moment.progress / self.over, 1.0)
            weights[:-1] *= self.start + (1 - self.start) * share
        return weights

    @property
    def needs_total(self) -> bool:
        return self.over > 0


@dataclass(frozen=True, kw_only=True)
class Annealed(WeightSchedule, name="annealed"):
    """Weights below the last depth fall linearly to `to` of their value, and stay there."""

    order: ClassVar[int] = Stage.FALL
    to: float = setting(0.0, least=0, help="Final share of the weights.")
    by: float = setting(0.8, above=0, most=1, help="Share of training it takes.")

    def __call__(self, weights: np.ndarray, moment: Moment) -> np.ndarray:
        share = min(moment.progress / self.by, 1.0)
        weights[:-1] *= 1 + (self.to - 1) * share
        return weights

    @property
    def needs_total(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Normalized(WeightSchedule, name="normalized"):
    """Weights sum to 1 at every step at which a depth has one."""

    order: ClassVar[int] = Stage.NORMALIZE

    def __call__(self, weights: np.ndarray, moment: Moment) -> np.ndarray:
        total = weights.sum()
        return weights / total if total > 0 else weights


@dataclass(frozen=True, kw_only=True)
class Sampled(WeightSchedule, name="sampled"):
    """The last depth and `k` others, sampled again at every step.

    Their weights are divided by the probability of being sampled, which keeps the expected loss.
    """

    order: ClassVar[int] = Stage.DRAW
    k: int = setting(least=1, help="Number of depths below the last to sample.")

    def __call__(self, weights: np.ndarray, moment: Moment) -> np.ndarray:
        others = np.flatnonzero(weights[:-1])
        if self.k >= len(others):
            return weights
        drawn = moment.random(0).choice(others, self.k, replace=False)
        kept = np.zeros_like(weights)
        kept[drawn] = weights[drawn] * (len(others) / self.k)
        kept[-1] = weights[-1]
        return kept

    def repeats(self, depth: int) -> int:
        if self.k >= depth - 1:
            return 1
        # The probability that one of n depths is never sampled is below n (1 - k/n)^steps.
        return math.ceil(math.log(1e-9 / depth) / math.log(1 - self.k / (depth - 1)))

    def check_depth(self, depth: int) -> None:
        most = max(depth - 1, 1)
        if self.k > most:
            raise SettingError(
                f"sampled: k={self.k}, but there are only {depth - 1} depths below the last; "
                f"use 1 to {most}"
            )
