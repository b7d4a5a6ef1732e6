"""Drafting in a shared batch: rows draft together, and only when it pays off."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from statistics import mean
from time import perf_counter, thread_time

import torch
from torch import Tensor

from everydepth.exits.generation.drafting import DraftHead
from everydepth.exits.generation.lookup import Lookup, Text
from everydepth.exits.generation.pacing import Ledger, Pace
from everydepth.exits.generation.sampling import (
    Dice,
    Draft,
    Sampling,
    Verdict,
    judge_drawn,
    judge_greedy,
)
from everydepth.serving.courses import Asked, Course, Said, Team
from everydepth.stream import ResidualStream

LONGEST = 16
"""The most drafts before the top depth judges them."""


def work_clock(device: torch.device) -> Callable[[], float]:
    """Seconds of work: on a CPU those of this thread, as others on the machine delay some rounds
    and not others."""
    return thread_time if device.type == "cpu" else perf_counter


class DraftTeam(Team):
    """Rows that are drafted in the same way, and judged by the same depth in the same rounds.

    So the blocks run once for all drafts, and one `Pace` learns from all requests what drafts,
    verifications and plain rounds cost, given whatever else is in the batch. When drafting does
    not pay off, rounds are plain; so are those in which one of them still reads its prompt, whose
    time says nothing about other rounds.

    depth: the depth that drafts; 0 is the text itself.
    always: draft in every round, even if it is slower.
    clock: what measures rounds; by default `work_clock`.
    """

    def __init__(
        self,
        stream: ResidualStream,
        depth: int,
        top: int,
        sampling: Sampling | None = None,
        generator: torch.Generator | None = None,
        *,
        always: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._stream, self._clock = stream, clock or work_clock(stream.device)
        self.depth, self.top = depth, top
        self.sampling, self.generator = sampling or Sampling(), generator
        # Rows that sample are alone. Drafts look ahead at the numbers that will judge them.
        self._dice = Dice.of(1, generator, stream.device) if self.sampling.do_sample else None
        self._ahead = self._dice
        self._ledger = Ledger(0)
        self._pace = Pace(self._ledger, always=always)
        # At most, a draft of the model costs a plain step; one of the text costs nothing.
        self._pace.prepare(0.0, float(depth > 0))
        self._since: float | None = None
        self._reading = False
        # The current drafts: the rows that take part, the drafts, and their times.
        self._members: Sequence[Course] = ()
        self._drafts: list[Draft] = []
        self._took: list[float] = []

    def expect(self, tokens: int) -> None:
        """Announce a request for more tokens."""
        self._ledger.expect(tokens)

    def drafting(self, course: Course) -> bool:
        return course in self._members

    @property
    def drafted(self) -> int:
        """The number of drafts that wait to be judged."""
        return len(self._drafts)

    # -- called by the batch ----------------------------------------------------------------------

    def begin(self, courses: Sequence[Course]) -> Mapping[Course, Sequence[int]]:
        ready = [course for course in courses if isinstance(course, Drafting) and course.read]
        self._reading = len(ready) < len(courses)
        if not ready:
            self._over()
            self._since = None
            return {}
        if self._since is None:
            self._since = self._clock()
        if not self._drafts:
            self._ledger.rows = len(ready)
        return self._begun(ready)

    def see(self, depth: int, asked: Sequence[Asked]) -> list[Said | None]:
        members = self._in_order(asked)
        said: dict[Course, Said] = {}
        plain = [one for one in asked if not self.drafting(one.course)]
        if members:
            said |= self._judged(members)
        elif any(isinstance(one.course, Drafting) and one.course.read for one in plain):
            took = self._elapsed()
            if not self._reading:
                self._ledger.learn_plain(took)
        for one in plain:
            said[one.course] = self._plain(one)
        return [said[one.course] for one in asked]

    # -- what a way of drafting adds --------------------------------------------------------------

    @abstractmethod
    def _begun(self, ready: Sequence[Drafting]) -> Mapping[Course, Sequence[int]]:
        """`begin` for these rows, which have read their prompts."""

    def _learn(self, judged: list[int], following: Tensor, logits: Tensor) -> None:
        """Learn from a round. judged: how many drafts of each row were right."""
        if judged:
            self._pace.learn(judged, self._took, self._elapsed())

    def _over(self) -> None:
        self._members, self._drafts, self._took = (), [], []

    # -- internal ---------------------------------------------------------------------------------

    def _in_order(self, asked: Sequence[Asked]) -> list[Asked]:
        """The rows that take part. They change their places in the batch as others leave, but
        drafts keep their order."""
        order = {course: i for i, course in enumerate(self._members)}
        members = (one for one in asked if one.course in order)
        return sorted(members, key=lambda one: order[one.course])

    def _plain(self, one: Asked) -> Said:
        course = one.course
        assert isinstance(course, Drafting)
        if not course.read:
            course.read = True
            if self.depth:
                prompt = torch.tensor(course.text.tokens, device=one.logits.device)
                course.unseen = prompt, one.logits.clone()
        return course.says(int(self.sampling.draw(one.logits, self.generator)))

    def _judged(self, members: Sequence[Asked]) -> dict[Course, Said]:
        drafts = self._drafts
        logits = torch.stack([one.logits for one in members])
        verdict = self._verdict(logits, drafts)
        accepted, columns = verdict.accepted.tolist(), [d.tokens.tolist() for d in drafts]
        self._learn(accepted if drafts else [], verdict.following, logits[:, -1])
        self._over()
        said: dict[Course, Said] = {}
        for row, (one, count, token) in enumerate(
            zip(members, accepted, verdict.following.tolist(), strict=True)
        ):
            assert isinstance(one.course, Drafting)
            kept = [column[row] for column in columns[:count]]
            said[one.course] = one.course.says(*kept, token, dropped=len(drafts) - count)
        return said

    def _verdict(self, logits: Tensor, drafts: list[Draft]) -> Verdict:
        if self._dice is None:
            return judge_greedy(logits, drafts)
        # When to draft depends on the clock, and a seed's text must not.
        return judge_drawn(logits, drafts, self.sampling, self._dice)

    def _drafts_at_all(self, first: Callable[[], float] | None = None) -> bool:
        with self._charged():
            return self._pace.drafts(first)

    @contextmanager
    def _charged(self) -> Generator[None, None, None]:
        """Drafts pay for the time inside the context, which is no part of a round."""
        start = self._clock()
        yield
        took = self._clock() - start
        self._ledger.charge(took)
        self._since = start if self._since is None else self._since + took

    def _elapsed(self) -> float:
        """Seconds since the last call, including those spent on other rows of the batch."""
        now, since = self._clock(), self._since
        self._since = now
        return 0.0 if since is None else now - since


class DepthTeam(DraftTeam):
    """Rows drafted by a depth of the model, with one readout over the likely words for all.

    A draft takes a round of its own, in which other rows of the batch go on.
    """

    _torn = _complete = False

    @cached_property
    def _head(self) -> DraftHead:
        return DraftHead(self._stream, self.depth, self.sampling, None)

    def _begun(self, ready: Sequence[Drafting]) -> Mapping[Course, Sequence[int]]:
        if not self._drafts:
            if not self._reading and self._drafts_at_all():
                self._prepare(ready)
                self._members = ready
                self._ahead = None if self._dice is None else self._dice.copied()
                self._pace.begin(len(ready))
            return {}
        self._torn |= self._reading  # judge the drafts so far
        kept = [i for i, course in enumerate(self._members) if course in ready]
        if len(kept) < len(self._members):  # a row has left
            self._torn = True
            self._members = [self._members[i] for i in kept]
            rows = torch.tensor(kept, device=self._drafts[0].tokens.device)
            self._drafts = [_of_rows(draft, rows) for draft in self._drafts]
            if not kept:
                self._over()
        return {}

    def see(self, depth: int, asked: Sequence[Asked]) -> list[Said | None]:
        if depth == self.top:
            return super().see(depth, asked)
        members = self._in_order(asked)
        told = self._drafted([one.h for one in members], min(one.remaining for one in asked))
        said = dict(zip((one.course for one in members), told, strict=True))
        return [said[one.course] for one in asked]

    def _prepare(self, courses: Sequence[Drafting]) -> None:
        """Show the head the prompts; drafts pay for that, and a text without drafts does not."""
        with self._charged():
            for course in courses:
                if course.unseen is not None:
                    self._head.see(*course.unseen)
                    course.unseen = None

    def _drafted(self, states: Sequence[Tensor], most: int) -> list[Said | None]:
        """Draft and feed another token, or let the top depth judge those that were fed."""
        if self._torn or self._complete or most == 1:
            return [None] * len(states)
        last = torch.cat([h[:, -1:] for h in states])
        draft = self._head.draft(last, self._ahead)
        self._drafts.append(draft)
        confidence = draft.confidence.tolist()
        self._took.append(self._elapsed())
        more = self._pace.goes_on(confidence)
        self._complete = not more or len(self._drafts) == min(most - 1, LONGEST)
        return [Said((), feed=token) for token in draft.tokens.tolist()]

    def _learn(self, judged: list[int], following: Tensor, logits: Tensor) -> None:
        super()._learn([] if self._torn else judged, following, logits)
        self._head.see(following, logits)

    def _over(self) -> None:
        super()._over()
        self._torn = self._complete = False


class TextTeam(DraftTeam):
    """Rows drafted by what followed the same words in their own text; no block runs for that.

    All drafts are made at once, and judged in the same round. Rows get equally many, so that they
    share the calls of the blocks; those of a row that has nothing to quote are wrong.
    """

    def _begun(self, ready: Sequence[Drafting]) -> Mapping[Course, Sequence[int]]:
        most = min(LONGEST, min(course.left for course in ready) - 1)
        if most < 1 or self._reading:
            return {}
        if not self._drafts_at_all(lambda: self._looked(ready, most)):
            return {}
        self._members = ready
        self._pace.begin(len(ready))
        more = True
        while more and len(self._drafts) < most:
            draft = self._found.draft(len(self._drafts), self._stream.device)
            self._drafts.append(draft)
            self._took.append(self._elapsed())
            more = self._pace.goes_on(draft.confidence.tolist())
        tokens = torch.stack([draft.tokens for draft in self._drafts], 1).tolist()
        return dict(zip(ready, tokens, strict=True))

    def _looked(self, ready: Sequence[Drafting], most: int) -> float:
        """Look for drafts; returns the chance of the first one."""
        self._found = Lookup([course.text for course in ready], most)
        return mean(map(self._pace.known.chance, self._found.confidence(0)))


def _of_rows(draft: Draft, rows: Tensor) -> Draft:
    return Draft(draft.tokens[rows], draft.confidence[rows])


class Drafting(Course):
    """Several tokens per round: drafted in the team's way, and judged by the top depth.

    tokens: the most the request may get.
    """

    def __init__(self, team: DraftTeam, *, prompt: Sequence[int], tokens: int) -> None:
        super().__init__(team.top, team.sampling, team.generator)
        self._team = team
        self.left, self._text, self._new = tokens, Text(prompt), list[int]()
        self.read = False
        """Whether all of the prompt has been read."""
        self.unseen: tuple[Tensor, Tensor] | None = None
        """The prompt and the logits after it, if no drafter has seen them."""
        team.expect(tokens)

    @property
    def team(self) -> DraftTeam:
        return self._team

    @property
    def text(self) -> Text:
        self._text.extend(self._new)
        self._new.clear()
        return self._text

    @property
    def stops(self) -> tuple[int, ...]:
        return self.reads if self.team.drafting(self) else (self.top,)

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.team.depth, self.top) if self.team.depth else (self.top,)

    def wants(self, depth: int) -> int:
        if not self.team.drafting(self):
            return 1
        return 0 if depth == self.team.depth else self.team.drafted + 1

    def see(self, depth: int, asked: Asked) -> Said | None:
        return self.team.see(depth, [asked])[0]

    def says(self, *tokens: int, dropped: int = 0) -> Said:
        """These tokens are final."""
        self._new.extend(tokens)
        self.left -= len(tokens)
        return Said(tokens, dropped=dropped)


class DraftTeams:
    """The teams of a server, one per pair of depths.

    Rows that sample have their own generator, and so their own team.
    """

    def __init__(self, stream: ResidualStream, clock: Callable[[], float] | None = None) -> None:
        self._stream, self._clock = stream, clock
        self._known: dict[tuple[int, int], DraftTeam] = {}

    def of(
        self, draft_depth: int, top: int, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTeam:
        if not sampling.do_sample and (draft_depth, top) in self._known:
            return self._known[draft_depth, top]
        kind = DepthTeam if draft_depth else TextTeam
        team = kind(self._stream, draft_depth, top, sampling, generator, clock=self._clock)
        if not sampling.do_sample:
            self._known[draft_depth, top] = team
        return team
