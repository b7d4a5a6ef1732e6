"""Governors choose the depth of requests that do not set one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from everydepth.config import checked
from everydepth.errors import SettingError
from everydepth.serving.costs import Price
from everydepth.serving.shared import Work, climb


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load of the server when a request starts.

    depths: of the running rows. waiting: the number of other waiting requests. places: the most
    rows that run at once. extra: additional blocks that some depths need (see `climb`).
    """

    depths: tuple[int, ...]
    waiting: int
    places: int
    price: Price
    extra: Mapping[int, int] = field(default_factory=dict[int, int])


class Governor(ABC):
    """A rule for the depth under load. `choose` is called when a request starts."""

    @abstractmethod
    def choose(self, load: Load, prompt: int, tokens: int, waited: float) -> int:
        """The depth of a request, given its numbers of tokens and the seconds it has waited."""

    def learn(self, tokens: int, waited: float, seconds: float) -> None:
        """Record a finished request: its new tokens, and the seconds it waited and then took."""
        del tokens, waited, seconds


@checked
@dataclass(frozen=True)
class Fixed(Governor):
    """Always the same depth."""

    depth: int

    def choose(self, load: Load, prompt: int, tokens: int, waited: float) -> int:
        return self.depth


@checked
class Target(Governor):
    """Choose the deepest depth at which 95% of requests should still meet a target.

    The time of a request is predicted from the prices of rounds, for the running rows and those
    that wait. Later arrivals are unknown, so the prediction is multiplied by `caution`, which every
    request that was too slow raises, and every other one lowers: in the long run, a share `MISSED`
    is too slow, whatever the load (online quantile tracking: Gibbs and Candes, 2021).

    depths: those that may be chosen, at any load.
    """

    AIM = 0.9  # a request counts as too slow beyond this share of the target
    MISSED = 0.03
    STEP = 0.1
    MOST = 8.0  # limits how long a load too high for any depth is remembered

    def __init__(self, target: float, depths: Sequence[int]) -> None:
        if not target > 0:
            raise SettingError(f"target={target}; use a number above 0")
        if not depths:
            raise SettingError("depths is empty; give the governor at least one depth")
        self.target, self.depths = target, tuple(sorted(set(depths), reverse=True))
        self.caution = 1.0

    @abstractmethod
    def allowed(self, tokens: int, waited: float) -> float:
        """The seconds a request may take once it starts."""

    def choose(self, load: Load, prompt: int, tokens: int, waited: float) -> int:
        allowed = self.allowed(tokens, waited)
        for depth in self.depths:
            if self.caution * predict(load, depth, prompt, tokens) <= allowed:
                return depth
        return self.depths[-1]

    def learn(self, tokens: int, waited: float, seconds: float) -> None:
        missed = seconds > self.allowed(tokens, waited)
        caution = self.caution * math.exp(self.STEP * (missed - self.MISSED))
        self.caution = min(max(caution, 1.0), self.MOST)


class Deadline(Target):
    """The target is in seconds, from a request's arrival to its last token."""

    def allowed(self, tokens: int, waited: float) -> float:
        return self.AIM * self.target - waited


class Speed(Target):
    """The target is in tokens per second, from a request's start to its last token."""

    def allowed(self, tokens: int, waited: float) -> float:
        return self.AIM * tokens / self.target


def predict(load: Load, depth: int, prompt: int, tokens: int) -> float:
    """The seconds a request would take at a depth if the load does not change."""
    rows = min(len(load.depths) + load.waiting + 1, load.places)
    others = rows - 1
    # Waiting requests are assumed to get the same depth.
    depths = sorted(load.depths, reverse=True)[:others]
    depths += [depth] * (others - len(depths)) + [depth]
    one_round = climb(depths, [1] * rows, load.extra) + Work(readouts=rows, reads=len(set(depths)))
    reading = climb([depth], [prompt], load.extra)
    # Their prompts are processed in between, and are assumed to be as long as this one.
    return (1 + load.waiting) * load.price.of(reading) + tokens * load.price.of(one_round)
