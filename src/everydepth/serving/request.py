"""Requests and their progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from everydepth.config import checked
from everydepth.errors import BatchError, EveryDepthError, SettingError
from everydepth.exits.generation.request import check_depths
from everydepth.exits.generation.sampling import Sampling
from everydepth.exits.policies import Policy
from everydepth.serving.courses import Course, Exiting, Plain
from everydepth.serving.drafts import Drafting, DraftTeams
from everydepth.serving.shared import Row
from everydepth.stream import ResidualStream

Finish = Literal["stop", "length", "cancelled"]


@checked
@dataclass(frozen=True, kw_only=True)
class Request:
    """One text to continue; depth None: what the governor says.

    whole: nobody reads the text before its end; tokens need not be handed over one by one.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 64
    depth: int | None = None
    draft_depth: int | None = None
    policy: Policy | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    ends: tuple[int, ...] = ()
    whole: bool = False

    def check(self, stream: ResidualStream) -> Request:
        """Returns itself, or raises an error that says what to change."""
        if not self.prompt:
            raise BatchError("the prompt is empty; send at least one token")
        stream.check_vocabulary(min(self.prompt), max(self.prompt), stream.classes)
        if self.max_tokens < 1:
            raise SettingError(f"max_tokens {self.max_tokens}; use 1 or more")
        total, places = len(self.prompt) + self.max_tokens, stream.positions
        if places is not None and total > places:
            raise BatchError(
                f"{len(self.prompt)} prompt tokens + {self.max_tokens} new ones = {total}, but "
                f"{stream.name} has {places} positions; shorten the prompt or lower max_tokens"
            )
        check_depths(stream, self.depth, self.draft_depth, self.policy)
        return self

    def course(self, stream: ResidualStream, top: int, teams: DraftTeams) -> Course:
        generator = None
        if self.sampling.do_sample:
            generator = torch.Generator(stream.device)
            generator.manual_seed(self.seed) if self.seed is not None else generator.seed()
        if self.policy is not None:
            return Exiting(stream, self.policy, top, self.sampling, generator)
        if self.draft_depth is not None and self.draft_depth < top:
            team = teams.of(self.draft_depth, top, self.sampling, generator)
            return Drafting(team, prompt=self.prompt, tokens=self.max_tokens)
        return Plain(top, self.sampling, generator)


@dataclass(eq=False)
class Ticket:
    """The progress of a request: its row, depth, times and tokens.

    error: why it was cancelled, if it could not begin.
    """

    request: Request
    arrived: float
    on_tokens: Callable[[Ticket, list[int]], None] | None = None
    row: Row | None = None
    depth: int | None = None
    begun: float | None = None
    first: float | None = None
    ended: float | None = None
    finish: Finish | None = None
    error: EveryDepthError | None = None
    tokens: list[int] = field(default_factory=list[int])

    @property
    def exits(self) -> list[int]:
        """The depth of each token so far, if a policy chooses it."""
        return [] if self.row is None else self.row.course.exits
