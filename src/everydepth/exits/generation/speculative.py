"""Self-speculative decoding: a shallow depth drafts, all blocks verify, the cache is one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from everydepth.exits.generation.drafting import DraftHead, DraftLength
from everydepth.exits.generation.output import Output
from everydepth.exits.generation.sampling import (
    Draft,
    Sampling,
    judge_greedy,
    judge_sampled,
)
from everydepth.exits.generation.tape import Tape


class Drafter:
    """Drafts tokens at one depth, and counts what becomes of them."""

    def __init__(self, head: DraftHead, length: DraftLength, depth: int, longest: int) -> None:
        self._head, self._length, self._depth, self._longest = head, length, depth, longest
        self._lengths: list[int] = []
        self._drafted = self._accepted = 0

    @property
    def counts(self) -> dict[str, Any]:
        return {
            "draft_lengths": tuple(self._lengths),
            "drafted": self._drafted,
            "accepted": self._accepted,
        }

    def draft(
        self, tape: Tape, tokens: Tensor, limit: int, generator: torch.Generator | None
    ) -> list[Draft]:
        """Feed certain tokens and draft what follows, as long as it pays."""
        self._length.begin(tape.rows)
        drafts: list[Draft] = []
        limit = min(limit, self._longest)
        while True:
            tape.feed(tokens)
            draft = self._head.draft(tape.advance(self._depth)[:, -1:], generator)
            drafts.append(draft)
            tokens = draft.tokens
            if not self._length.goes_on(draft.confidence) or len(drafts) == limit:
                return drafts

    def learn(self, drafts: list[Draft], accepted: list[int], seen: Tensor, logits: Tensor) -> None:
        self._lengths.append(len(drafts))
        self._accepted += sum(accepted)
        self._drafted += sum(min(count + 1, len(drafts)) for count in accepted)
        self._length.learn(accepted)
        self._head.see(seen, logits)


def decode_with_drafts(
    tape: Tape,
    out: Output,
    tokens: Tensor,
    drafter: Drafter,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> None:
    """Rounds of drafting and verifying.

    A round feeds the last certain token and all drafts but the last, so that after n drafts the
    full depth has judged exactly n of them: if all are right, the last is the next round's certain
    token; else the full depth's own choice takes the place of the first wrong one. Either way a
    round of n drafts costs n tokens, and no block sees a token twice.
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
        drafts = drafter.draft(tape, tokens, out.remaining, generator)
        logits = tape.logits(tape.top)
        if sampling.do_sample:
            verdict = judge_sampled(sampling.probabilities(logits), drafts, generator)
        else:
            verdict = judge_greedy(logits, drafts)
        span, accepted = len(drafts), verdict.accepted.tolist()
        tokens = torch.where(verdict.accepted == span, drafts[-1].tokens, verdict.correction)
        tape.reject([min(count + 1, span) for count in accepted], span)
        drafter.learn(drafts, accepted, tokens, logits[:, -1])
        columns = [draft.tokens.tolist() for draft in drafts]
        last = tokens.tolist()
        new = [
            [column[row] for column in columns[: min(count, span - 1)]] + [last[row]]
            for row, count in enumerate(accepted)
        ]
