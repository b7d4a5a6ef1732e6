"""Drafting in a shared batch: rows draft together, and only when it pays off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from everydepth.exits.generation.drafting import DraftHead
from everydepth.exits.generation.pacing import Ledger, Pace
from everydepth.exits.generation.sampling import (
    Draft,
    Sampling,
    Verdict,
    judge_greedy,
    judge_sampled,
)
from everydepth.serving.courses import Asked, Course, Said, Team
from everydepth.stream import ResidualStream

LONGEST = 16
"""The most drafts before the top depth judges them."""


class DraftTeam(Team):
    """Rows with the same draft depth and top depth, which draft and are judged in the same rounds.

    So they share one readout over the likely words, the blocks above run once for all drafts, and
    one `Pace` learns from all requests what drafts, verifications and plain rounds cost, given
    whatever else is in the batch. When drafting does not pay off, rounds are plain.

    always: draft in every round, even if it is slower.
    """

    def __init__(
        self,
        stream: ResidualStream,
        draft_depth: int,
        top: int,
        sampling: Sampling | None = None,
        generator: torch.Generator | None = None,
        *,
        always: bool = False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._clock = clock
        self.depth, self.top = draft_depth, top
        self.sampling, self.generator = sampling or Sampling(), generator
        self._head = DraftHead(stream, draft_depth, self.sampling, None)
        self._ledger = Ledger(0)
        self._pace = Pace(self._ledger, always=always)
        self._since: float | None = None
        # The current drafts: the rows that take part, the drafts, and their times.
        self._members: Sequence[Course] = ()
        self._drafts: list[Draft] = []
        self._took: list[float] = []
        self._torn = self._complete = False

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

    def begin(self, courses: Sequence[Course]) -> None:
        ready = [course for course in courses if isinstance(course, Drafting) and course.read]
        if not ready:
            self._over()
            self._since = None
            return
        if self._since is None:
            self._since = self._clock()
        if not self._drafts:
            self._ledger.rows = len(ready)
            if self._pace.drafts():
                self._prepare(ready)
                self._members = ready
                self._pace.begin(len(ready))
            return
        kept = [i for i, course in enumerate(self._members) if course in ready]
        if len(kept) < len(self._members):  # a row has left: judge the drafts so far
            self._torn = True
            self._members = [self._members[i] for i in kept]
            rows = torch.tensor(kept, device=self._drafts[0].tokens.device)
            self._drafts = [_of_rows(draft, rows) for draft in self._drafts]
            if not kept:
                self._over()

    def see(self, depth: int, asked: Sequence[Asked]) -> list[Said | None]:
        # Rows change their places in the batch as others leave, but drafts keep their order.
        order = {course: i for i, course in enumerate(self._members)}
        members = sorted(
            (one for one in asked if one.course in order), key=lambda one: order[one.course]
        )
        if depth == self.depth:
            told = self._drafted([one.h for one in members], min(one.remaining for one in asked))
            return [told[order[one.course]] for one in asked]
        said: dict[Course, Said] = {}
        plain = [one for one in asked if not self.drafting(one.course)]
        if members:
            said |= self._judged(members)
        elif any(isinstance(one.course, Drafting) and one.course.read for one in plain):
            self._ledger.learn_plain(self._elapsed())
        for one in plain:
            said[one.course] = self._plain(one)
        return [said[one.course] for one in asked]

    # -- internal ---------------------------------------------------------------------------------

    def _prepare(self, courses: Sequence[Drafting]) -> None:
        """Show the head the prompts; drafts pay for that, and a text without drafts does not."""
        start = self._clock()
        for course in courses:
            if course.unseen is not None:
                self._head.see(*course.unseen)
                course.unseen = None
        took = self._clock() - start
        self._ledger.charge(took)
        self._since = start if self._since is None else self._since + took

    def _plain(self, one: Asked) -> Said:
        course = one.course
        assert isinstance(course, Drafting)
        if not course.read:
            prompt = torch.tensor(course.prompt, device=one.logits.device)
            course.read, course.unseen = True, (prompt, one.logits.clone())
        return Said((int(self.sampling.draw(one.logits, self.generator)),))

    def _drafted(self, states: Sequence[Tensor], most: int) -> list[Said | None]:
        """Draft and feed another token, or let the top depth judge those that were fed."""
        if self._torn or self._complete or most == 1:
            return [None] * len(states)
        draft = self._head.draft(torch.cat([h[:, -1:] for h in states]), self.generator)
        self._drafts.append(draft)
        confidence = draft.confidence.tolist()
        self._took.append(self._elapsed())
        more = self._pace.goes_on(confidence)
        self._complete = not more or len(self._drafts) == min(most - 1, LONGEST)
        return [Said((), feed=token) for token in draft.tokens.tolist()]

    def _judged(self, members: Sequence[Asked]) -> dict[Course, Said]:
        drafts = self._drafts
        logits = torch.stack([one.logits for one in members])
        verdict = self._verdict(logits, drafts)
        accepted, columns = verdict.accepted.tolist(), [d.tokens.tolist() for d in drafts]
        if drafts and not self._torn:
            self._pace.learn(accepted, self._took, self._elapsed())
        self._head.see(verdict.following, logits[:, -1])
        self._over()
        said: dict[Course, Said] = {}
        for row, (one, count, token) in enumerate(
            zip(members, accepted, verdict.following.tolist(), strict=True)
        ):
            kept = [column[row] for column in columns[:count]]
            said[one.course] = Said((*kept, token), dropped=len(drafts) - count)
        return said

    def _verdict(self, logits: Tensor, drafts: list[Draft]) -> Verdict:
        if self.sampling.do_sample:
            return judge_sampled(self.sampling.probabilities(logits), drafts, self.generator)
        return judge_greedy(logits, drafts)

    def _elapsed(self) -> float:
        """Seconds since the last call, including those spent on other rows of the batch."""
        now, since = self._clock(), self._since
        self._since = now
        return 0.0 if since is None else now - since

    def _over(self) -> None:
        self._members, self._drafts, self._took = (), [], []
        self._torn = self._complete = False


def _of_rows(draft: Draft, rows: Tensor) -> Draft:
    q = None if draft.q is None else draft.q[rows]
    return Draft(draft.tokens[rows], draft.confidence[rows], q, draft.ids)


class Drafting(Course):
    """Several tokens per round: drafted at a shallow depth, and judged by the top depth.

    tokens: the most the request may get.
    """

    def __init__(self, team: DraftTeam, *, prompt: Sequence[int], tokens: int) -> None:
        super().__init__(team.top, team.sampling, team.generator)
        self._team = team
        self.prompt, self.read = list(prompt), False
        self.unseen: tuple[Tensor, Tensor] | None = None
        """The prompt and the logits after it, if the draft head has not seen them."""
        team.expect(tokens)

    @property
    def team(self) -> DraftTeam:
        return self._team

    @property
    def stops(self) -> tuple[int, ...]:
        return (self.team.depth, self.top) if self.team.drafting(self) else (self.top,)

    @property
    def reads(self) -> tuple[int, ...]:
        return self.team.depth, self.top

    def wants(self, depth: int) -> int:
        if not self.team.drafting(self):
            return 1
        return 0 if depth == self.team.depth else self.team.drafted + 1

    def see(self, depth: int, asked: Asked) -> Said | None:
        return self.team.see(depth, [asked])[0]


class DraftTeams:
    """The teams of a server, one per pair of depths.

    Rows that sample have their own generator, and so their own team.
    """

    def __init__(self, stream: ResidualStream, clock: Callable[[], float] = perf_counter) -> None:
        self._stream, self._clock = stream, clock
        self._known: dict[tuple[int, int], DraftTeam] = {}

    def of(
        self, draft_depth: int, top: int, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTeam:
        if not sampling.do_sample and (draft_depth, top) in self._known:
            return self._known[draft_depth, top]
        depths = draft_depth, top
        team = DraftTeam(self._stream, *depths, sampling, generator, clock=self._clock)
        if not sampling.do_sample:
            self._known[depths] = team
        return team
