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

LOOK = 8  # the share of the blocks above a draft that tells what all of them cost


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

    def affordable(self, tape: Tape, drafts: list[Draft]) -> list[Draft]:
        """The drafts to verify: where nobody knows what so many cost, the first blocks tell."""
        if not self.pace.looks(len(drafts)):
            return drafts
        start = clock()
        tape.advance(self.depth + max(1, (tape.top - self.depth) // LOOK))
        kept = self.pace.affordable(len(drafts), clock() - start)
        if kept < len(drafts):
            tape.forget(len(drafts) - kept)
        return drafts[:kept]

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

    @property
    def _best(self) -> Drafter:
        only, *others = self._drafters
        return max(self._drafters, key=lambda d: d.pace.rate) if others else only

    def rest(self) -> int:
        """Plain steps before anybody has to be asked again."""
        steps = self._best.pace.rest()
        self.ledger.rest(steps)
        return steps

    def next(self, tape: Tape) -> Drafter | None:
        """Who drafts in this round; None for a plain step."""
        best = self._best
        if not best.pace.drafts():
            return None
        if best in self._ahead:
            # Drafting has to pay for this, too; a text without drafts never does.
            start = clock()
            best.see(*self._ahead.pop(best))
            tape.catch_up(best.depth)
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
    plain step; while drafts are not to be thought of, it costs no more than one.
    """
    new, accepted = [[token] for token in tokens.tolist()], None
    ledger, rest = drafters.ledger, 0
    ledger.rows = tape.rows
    while True:
        going = out.emit(new, accepted)
        if not out.active:
            return
        if going is not None:
            rows = torch.tensor(going, device=tokens.device)
            tape.select(rows)
            tokens = tokens[rows]
            ledger.rows, rest = tape.rows, 0
        drafter = None if rest else drafters.next(tape)
        if drafter is None:
            start = clock()
            tape.feed(tokens)
            tokens = sampling.draw(tape.last_logits(tape.top), generator)
            new, accepted = [[token] for token in tokens.tolist()], None
            if rest:
                rest -= 1
            else:
                ledger.learn_plain(clock() - start, uneven=tape.uneven)
                rest = 0 if tape.uneven else drafters.rest()
            continue
        drafts = drafter.draft(tape, tokens, out.remaining, generator)
        start = clock()
        drafts = drafter.affordable(tape, drafts)
        drafters.lengths.append(len(drafts))
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
