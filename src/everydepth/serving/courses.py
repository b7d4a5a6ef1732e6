"""Courses: at which depths a request is read out, and what it says there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everydepth.exits.generation.sampling import Sampling
from everydepth.exits.policies import NEVER, Memory, Policy
from everydepth.stream import ResidualStream


@dataclass(frozen=True)
class Said:
    """The outcome of a round for a row.

    tokens: the new tokens that are final.
    feed: the next token to read, if not the last of these.
    dropped: the number of last tokens that are taken back.
    """

    tokens: tuple[int, ...]
    feed: int | None = None
    dropped: int = 0


@dataclass(frozen=True)
class Asked:
    """A row at a stop, with its states `h` (1, tokens, dim) and `logits` (wanted, v).

    remaining: the number of tokens the request may still get.
    """

    course: Course
    h: Tensor
    logits: Tensor
    remaining: int


class Team(ABC):
    """Courses that decide together."""

    @abstractmethod
    def begin(self, courses: Sequence[Course]) -> Mapping[Course, Sequence[int]]:
        """Called at the beginning of a round, with the courses in it; returns the tokens that
        some of them read ahead in this round."""

    @abstractmethod
    def see(self, depth: int, asked: Sequence[Asked]) -> list[Said | None]:
        """`Course.see` for all members at this stop."""


class Course(ABC):
    """The way of one request through the depths; `top` is the depth that decides.

    `stops` are the depths at which the row is asked, in order; the last one is `top`. At a stop,
    `see` either says something, and the row waits there until the next round, or returns None, and
    the row continues, with all tokens that wait at this depth. A course with a `team` is asked
    through it.
    """

    @property
    def team(self) -> Team | None:
        """The team it decides with, or None."""
        return None

    def __init__(
        self, top: int, sampling: Sampling, generator: torch.Generator | None = None
    ) -> None:
        self.top, self.sampling, self.generator = top, sampling, generator
        self.exits: list[int] = []
        """The depth of each token so far, where it is not always `top`."""

    @property
    def stops(self) -> tuple[int, ...]:
        return (self.top,)

    @property
    def reads(self) -> tuple[int, ...]:
        """The depths at which it may ever be asked."""
        return self.stops

    def wants(self, depth: int) -> int:
        """The number of last tokens whose logits are needed at this stop."""
        return 1

    @abstractmethod
    def see(self, depth: int, asked: Asked) -> Said | None:
        """What it says at a stop; None to continue."""


class Plain(Course):
    """One token per round, read out at one depth."""

    def see(self, depth: int, asked: Asked) -> Said | None:
        return Said((int(self.sampling.draw(asked.logits, self.generator)),))


class Exiting(Course):
    """One token per round, read out at the first depth that a policy trusts."""

    def __init__(
        self,
        stream: ResidualStream,
        policy: Policy,
        top: int,
        sampling: Sampling,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(top, sampling, generator)
        self._policy = policy
        self._thresholds = (*policy.thresholds(stream)[: top - 1], -NEVER)
        self._memory: Memory = ()
        self._stops = tuple(
            depth
            for depth, threshold in enumerate(self._thresholds, start=1)
            if threshold != NEVER or policy.remembers
        )

    @property
    def stops(self) -> tuple[int, ...]:
        return self._stops

    def see(self, depth: int, asked: Asked) -> Said | None:
        drawn = self.sampling.draw(asked.logits, self.generator)
        certainty, self._memory = self._policy.certainty(asked.logits, self._memory)
        if float(certainty) < self._thresholds[depth - 1]:
            return None
        self._memory = ()
        self.exits.append(depth)
        return Said((int(drawn),))
