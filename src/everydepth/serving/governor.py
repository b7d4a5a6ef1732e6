"""Who decides how deep a request goes, when the request itself does not say."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from everydepth.errors import SettingError
from everydepth.serving.costs import Price
from everydepth.serving.shared import Work, climb


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a new request finds.

    depths: of the rows at work; waiting: how many more requests wait; places: how many rows fit.
    extra: blocks that some depths need beside their own.
    """

    depths: tuple[int, ...]
    waiting: int
    places: int
    price: Price
    extra: Mapping[int, int] = field(default_factory=dict[int, int])


class Governor(ABC):
    """A rule for depth under load. `choose` is called when a row is free for the request."""

    @abstractmethod
    def choose(self, load: Load, prompt: int, tokens: int, waited: float) -> int:
        """The depth for a request of so many tokens that has waited so many seconds."""

    def learn(self, tokens: int, waited: float, seconds: float) -> None:
        """A request of so many tokens that had waited so long then took so many seconds."""
        del tokens, waited, seconds


@dataclass(frozen=True)
class Fixed(Governor):
    """Always the same depth."""

    depth: int

    def choose(self, load: Load, prompt: int, tokens: int, waited: float) -> int:
        return self.depth


class Target(Governor):
    """The deepest depth at which 95 of 100 requests should still meet a target.

    depths: those that may be chosen; the shallowest is the floor of quality, which the load never
    breaks. How long a request will take follows from the prices of the rounds, for the rows at
    work and as many more as wait. Who will come later is unknown, so predictions are multiplied by
    `caution`: every request that was too slow raises it, every other lowers it, so that in the long
    run a share of `MISSED` is too slow, whatever the load (online tracking of a quantile: Gibbs
    and Candes, 2021).
    """

    AIM = 0.9  # of the target: a request counts as too slow before it is
    MISSED = 0.03
    STEP = 0.1
    MOST = 8.0  # a load that no depth carries must not be remembered for long

    def __init__(self, target: float, depths: Sequence[int]) -> None:
        if not target > 0:
            raise SettingError(f"a target of {target}; use a number above 0")
        if not depths:
            raise SettingError("a governor without depths to choose from; give at least one")
        self.target, self.depths = target, tuple(sorted(set(depths), reverse=True))
        self.caution = 1.0

    @abstractmethod
    def allowed(self, tokens: int, waited: float) -> float:
        """Seconds that a request may take which begins after it has waited."""

    @property
    def floor(self) -> int:
        return self.depths[-1]

    def choose(self, load: Load, prompt: int, tokens: int, waited: float) -> int:
        allowed = self.allowed(tokens, waited)
        for depth in self.depths:
            if self.caution * predict(load, depth, prompt, tokens) <= allowed:
                return depth
        return self.floor

    def learn(self, tokens: int, waited: float, seconds: float) -> None:
        missed = seconds > self.allowed(tokens, waited)
        caution = self.caution * math.exp(self.STEP * (missed - self.MISSED))
        self.caution = min(max(caution, 1.0), self.MOST)


class Deadline(Target):
    """The target is a number of seconds from a request's arrival to its last token."""

    def allowed(self, tokens: int, waited: float) -> float:
        return self.AIM * self.target - waited


class Speed(Target):
    """The target is a number of tokens a second, from when a request begins to its last token."""

    def allowed(self, tokens: int, waited: float) -> float:
        return self.AIM * tokens / self.target


def predict(load: Load, depth: int, prompt: int, tokens: int) -> float:
    """Seconds that a request would take at a depth, if the others stay as they are."""
    rows = min(len(load.depths) + load.waiting + 1, load.places)
    others = rows - 1
    # Those that wait will go as deep as this one.
    depths = sorted(load.depths, reverse=True)[:others]
    depths += [depth] * (others - len(depths)) + [depth]
    one_round = climb(depths, 1, load.extra) + Work(readouts=rows, reads=len(set(depths)))
    reading = climb([depth], prompt, load.extra)
    # The prompts of those that wait are read in between; theirs are taken to be like this one.
    return (1 + load.waiting) * load.price.of(reading) + tokens * load.price.of(one_round)
