"""Self-speculative decoding: a shallow depth drafts, all blocks verify, the cache is one."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter as clock
from typing import Any

import torch
from torch import Tensor

from everydepth.exits.generation.drafting import DraftHead
from everydepth.exits.generation.output import Output
from everydepth.exits.generation.pacing import Ledger, Pace
from everydepth.exits.generation.sampling import (
    Draft,
    Sampling,
    judge_greedy,
    judge_sampled,
)
from everydepth.exits.generation.tape import Tape


class Drafter:
    """Drafts tokens at one depth, and counts what becomes of them."""

    def __init__(self, head: DraftHead, pace: Pace, depth: int, longest: int) -> None:
        self._head, self.pace, self.depth, self._longest = head, pace, depth, longest
        self.lengths: list[int] = []
        self.drafted = self.accepted = 0
        self._took: list[float] = []

    def draft(
        self, tape: Tape, tokens: Tensor, limit: int, generator: torch.Generator | None
    ) -> list[Draft]:
        """Feed certain tokens and draft what follows, as long as it pays."""
        self.pace.begin(tape.rows)
        drafts: list[Draft] = []
        limit, self._took = min(limit, self._longest), []
        while True:
            start = clock()
            tape.feed(tokens)
            draft = self._head.draft(tape.advance(self.depth)[:, -1:], generator)
            drafts.append(draft)
            tokens = draft.tokens
            confidence = draft.confidence.tolist()  # waits for the device
            self._took.append(clock() - start)
            if not self.pace.goes_on(confidence) or len(drafts) == limit:
                return drafts

    def see(self, tokens: Tensor, logits: Tensor) -> None:
        """Learn from the text, and from what the full depth finds likely."""
        self._head.see(tokens, logits)

    def learn(self, drafts: list[Draft], accepted: list[int], seconds: float, gained: int) -> None:
        self.lengths.append(len(drafts))
        self.accepted += sum(accepted)
        self.drafted += sum(min(count + 1, len(drafts)) for count in accepted)
        self.pace.learn(accepted, self._took, seconds, gained)


class Drafters:
    """One drafter a depth; the one that gives most tokens a second goes on.

    prompt, logits: what a drafter sees before its first draft.
    """

    def __init__(
        self, drafters: Sequence[Drafter], ledger: Ledger, prompt: Tensor, logits: Tensor
    ) -> None:
        self._drafters, self.ledger = tuple(drafters), ledger
        self._ahead = dict.fromkeys(self._drafters, (prompt, logits))
        self.lengths: list[int] = []

    @property
    def counts(self) -> dict[str, Any]:
        return {
            "draft_lengths": tuple(self.lengths),
            "drafted": sum(d.drafted for d in self._drafters),
            "accepted": sum(d.accepted for d in self._drafters),
            "draft_depths": {d.depth: len(d.lengths) for d in self._drafters},
        }

    def next(self) -> Drafter | None:
        """Who drafts in this round; None for a plain step."""
        only, *others = self._drafters
        best = max(self._drafters, key=lambda d: d.pace.rate) if others else only
        if not best.pace.drafts():
            return None
        if best in self._ahead:
            # Drafting has to pay for this, too; a text without drafts never does.
            start = clock()
            best.see(*self._ahead.pop(best))
            self.ledger.charge(clock() - start)
        return best


def decode_with_drafts(
    tape: Tape,
    out: Output,
    tokens: Tensor,
    drafters: Drafters,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> None:
    """Rounds of drafting and verifying.

    A round feeds the last certain token and all drafts but the last, so that after n drafts the
    full depth has judged exactly n of them: if all are right, the last is the next round's certain
    token; else the full depth's own choice takes the place of the first wrong one. Either way a
    round of n drafts costs n tokens, and no block sees a token twice. A round without drafts is a
    plain step.
    """
    new, accepted = [[token] for token in tokens.tolist()], None
    while True:
        going = out.emit(new, accepted)
        if not out.active:
            return
        if going is not None:
            rows = torch.tensor(going, device=tokens.device)
            tape.select(rows)
            tokens = tokens[rows]
        drafter = drafters.next()
        if drafter is None:
            start = clock()
            tape.feed(tokens)
            tokens = sampling.draw(tape.last_logits(tape.top), generator)
            new, accepted = [[token] for token in tokens.tolist()], None
            drafters.ledger.learn_plain(clock() - start, uneven=tape.uneven)
            continue
        drafts = drafter.draft(tape, tokens, out.remaining, generator)
        drafters.lengths.append(len(drafts))
        start = clock()
        logits = tape.logits(tape.top)
        if sampling.do_sample:
            verdict = judge_sampled(sampling.probabilities(logits), drafts, generator)
        else:
            verdict = judge_greedy(logits, drafts)
        span, accepted = len(drafts), verdict.accepted.tolist()
        kept = [min(count + 1, span) for count in accepted]
        # Rows of different lengths need a mask from then on: not before drafts are known to pay.
        level = span if drafter.pace.pays else min(kept)
        kept = [min(count, level) for count in kept]
        tokens = torch.where(
            verdict.accepted >= level, drafts[level - 1].tokens, verdict.correction
        )
        tape.reject(kept, span)
        drafter.see(tokens, logits[:, -1])
        drafter.learn(drafts, accepted, clock() - start, out.nearer(kept))
        columns = [draft.tokens.tolist() for draft in drafts]
        last = tokens.tolist()
        new = [
            [column[row] for column in columns[: min(count, level - 1)]] + [last[row]]
            for row, count in enumerate(accepted)
        ]
