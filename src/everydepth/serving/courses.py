"""How a request climbs: where on the way up it is read out, and what it says there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from time import perf_counter as clock

import torch
from torch import Tensor

from everydepth.exits.generation.drafting import DraftHead
from everydepth.exits.generation.pacing import Pace
from everydepth.exits.generation.sampling import Draft, Sampling, judge_greedy, judge_sampled
from everydepth.exits.policies import NEVER, Memory, Policy
from everydepth.stream import ResidualStream


@dataclass(frozen=True)
class Said:
    """What came of a climb.

    tokens: those that are certain now. feed: what the row reads next, if not the last of them.
    dropped: how many of the tokens it has read are taken back, the last ones.
    """

    tokens: tuple[int, ...]
    feed: int | None = None
    dropped: int = 0


class Course(ABC):
    """The way of one request; `top` is the depth that decides.

    `stops` are the depths at which the row is asked, in order; the last one is `top`. At a stop
    `see` either says something, and the row stays there until the next round, or gives None, and
    the row climbs on, with all tokens that wait at this depth.
    """

    def __init__(
        self, top: int, sampling: Sampling, generator: torch.Generator | None = None
    ) -> None:
        self.top, self.sampling, self.generator = top, sampling, generator

    @property
    def stops(self) -> tuple[int, ...]:
        return (self.top,)

    def wants(self, depth: int) -> int:
        """Of how many tokens, counted from the last, the logits of this stop are needed."""
        return 1

    @abstractmethod
    def see(self, depth: int, h: Tensor, logits: Tensor, remaining: int) -> Said | None:
        """`h` (1, tokens, dim) are the states at a stop, `logits` (wanted, v) what they say.

        remaining: how many more tokens the request may get.
        """


class Plain(Course):
    """One token a round, read out at one depth."""

    def see(self, depth: int, h: Tensor, logits: Tensor, remaining: int) -> Said | None:
        return Said((int(self.sampling.draw(logits, self.generator)),))


class Exiting(Course):
    """One token a round, read out at the first depth that a policy trusts."""

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
        self.depths: list[int] = []
        """The depth of each token so far."""

    @property
    def stops(self) -> tuple[int, ...]:
        return self._stops

    def see(self, depth: int, h: Tensor, logits: Tensor, remaining: int) -> Said | None:
        drawn = self.sampling.draw(logits, self.generator)
        certainty, self._memory = self._policy.certainty(logits, self._memory)
        if float(certainty) < self._thresholds[depth - 1]:
            return None
        self._memory = ()
        self.depths.append(depth)
        return Said((int(drawn),))


class Drafting(Course):
    """Several tokens a round: drafted at a shallow depth, judged by the top, which decides."""

    def __init__(
        self,
        stream: ResidualStream,
        draft_depth: int,
        top: int,
        sampling: Sampling,
        generator: torch.Generator | None = None,
        *,
        prompt: list[int],
        longest: int = 16,
    ) -> None:
        super().__init__(top, sampling, generator)
        self._depth, self._longest = draft_depth, longest
        self._prompt: list[int] | None = prompt
        self._head = DraftHead(stream, draft_depth, sampling, None)
        # In a shared batch there is no plain step of its own to compare with.
        self._pace = Pace(longest, always=True)
        self._seen, self._took = clock(), list[float]()
        self._drafts: list[Draft] = []
        self.drafted = self.accepted = 0

    @property
    def stops(self) -> tuple[int, ...]:
        return (self.top,) if self._prompt is not None else (self._depth, self.top)

    def wants(self, depth: int) -> int:
        if self._prompt is not None:
            return 1
        return 0 if depth == self._depth else len(self._drafts)

    def see(self, depth: int, h: Tensor, logits: Tensor, remaining: int) -> Said | None:
        if self._prompt is not None:
            self._head.see(torch.tensor(self._prompt, device=logits.device), logits)
            self._prompt, self._seen = None, clock()
            return Said((int(self.sampling.draw(logits, self.generator)),))
        now = clock()
        took, self._seen = now - self._seen, now
        if depth == self._depth:
            self._took.append(took)
            return self._drafted(h, min(remaining, self._longest))
        return self._judged(logits, took)

    def _drafted(self, h: Tensor, limit: int) -> Said | None:
        if not self._drafts:
            self._pace.begin(1)
        draft = self._head.draft(h[:, -1:], self.generator)
        self._drafts.append(draft)
        if not self._pace.goes_on(draft.confidence.tolist()) or len(self._drafts) == limit:
            return None
        return Said((), feed=int(draft.tokens))

    def _judged(self, logits: Tensor, seconds: float) -> Said:
        drafts, self._drafts = self._drafts, []
        if self.sampling.do_sample:
            p = self.sampling.probabilities(logits[None])
            verdict = judge_sampled(p, drafts, self.generator)
        else:
            verdict = judge_greedy(logits[None], drafts)
        span, accepted = len(drafts), int(verdict.accepted)
        last = drafts[-1].tokens if accepted == span else verdict.correction
        took, self._took = self._took, []
        self._pace.learn([accepted], took, seconds)
        self._head.see(last, logits[-1:])
        self.accepted += accepted
        self.drafted += min(accepted + 1, span)
        kept = [int(draft.tokens) for draft in drafts[: min(accepted, span - 1)]]
        return Said((*kept, int(last)), dropped=span - min(accepted + 1, span))
