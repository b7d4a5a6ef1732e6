"""Self-speculative decoding: a shallow depth or the text itself drafts, and all blocks verify."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter as clock
from typing import Any

import torch
from torch import Tensor

from everydepth.exits.generation.drafting import DraftHead
from everydepth.exits.generation.lookup import Lookup, Text
from everydepth.exits.generation.output import Output
from everydepth.exits.generation.pacing import (
    Experience,
    Ledger,
    Pace,
    experience_of,
    remember,
)
from everydepth.exits.generation.packing import PACKED_FROM
from everydepth.exits.generation.request import Prompt
from everydepth.exits.generation.sampling import (
    Dice,
    Draft,
    Sampling,
    Verdict,
    judge_drawn,
    judge_greedy,
)
from everydepth.exits.generation.tape import Tape
from everydepth.stream import ResidualStream, unwrapped

PROBED = 12  # one in twelve of the blocks above a draft is timed, to estimate the cost of all


class Drafter(ABC):
    """Drafts tokens in one way, and counts how many are accepted.

    depth: the number of blocks that a draft takes.
    exits: the number of blocks of that depth's own exit.
    share: an upper bound of what its readout costs, as a share of the vocabulary's.
    """

    exits = 0
    share = 0.0

    def __init__(self, pace: Pace, depth: int, longest: int) -> None:
        self.pace, self.depth, self.longest = pace, depth, longest
        self.lengths: list[int] = []
        self.drafted = self.accepted = 0
        self._took: list[float] = []

    def prepare(self, top: int, read_in: float) -> None:
        """Tell the pace what a first round may cost, before anything has been timed.

        read_in: the seconds in which all blocks read the prompt; the exit has yet to read it.
        """
        draft = (self.depth + self.exits) / top + self.share
        few = self._few(top)
        first = (self.depth + 3 * few) / top if few else 1.0
        self.pace.prepare(read_in * self.exits / top, draft, first)

    def chance(self, out: Output) -> Callable[[], float] | None:
        """Looks at the text so far and returns the chance of the first draft; None if nothing is
        known but the usual one."""
        return None

    @abstractmethod
    def drafted_at(self, place: int, tape: Tape, dice: Dice | None) -> Draft:
        """The draft at this place of the round, after what was fed."""

    def draft(self, tape: Tape, tokens: Tensor, limit: int, dice: Dice | None) -> list[Draft]:
        """Feed certain tokens and draft what follows, as long as that pays off.

        The last draft is not fed.
        """
        dice = None if dice is None else dice.copied()
        self.pace.begin(tape.rows)
        drafts: list[Draft] = []
        limit, self._took = min(limit, self.longest), []
        while True:
            start = clock()
            tape.feed(tokens)
            draft = self.drafted_at(len(drafts), tape, dice)
            drafts.append(draft)
            tokens = draft.tokens
            confidence = draft.confidence.tolist()  # waits for the device
            self._took.append(clock() - start)
            if not self.pace.goes_on(confidence) or len(drafts) == limit:
                return drafts

    def feed_last(self, tape: Tape, drafts: list[Draft]) -> list[Draft]:
        """Feed the last draft; returns the drafts to verify.

        If no draft was ever verified, a few blocks show first what a second token costs. If that is
        too much, the draft is given up.
        """
        few = self._few(tape.top)
        if not self.pace.untried or not few:
            tape.feed(drafts[-1].tokens)
            return drafts
        alone = _seconds(lambda: tape.advance(self.depth + few))
        tape.feed(drafts[-1].tokens)
        tape.advance(self.depth + few)
        both = _seconds(lambda: tape.advance(self.depth + 2 * few))
        if self.pace.bears(both / max(alone, 1e-9), self._took):
            return drafts
        tape.forget(1)
        return []

    def _few(self, top: int) -> int:
        """The number of blocks to time, twice; 0 if there are too few."""
        above = top - self.depth
        return max(1, above // PROBED) if above > 2 else 0

    def see(self, tokens: Tensor, logits: Tensor) -> None:  # noqa: B027 (the text need not see)
        """Learn from the text, and from what the full depth finds likely."""

    def learn(self, accepted: list[int], drafts: int, seconds: float, gained: int) -> None:
        self.lengths.append(drafts)
        self.accepted += sum(accepted)
        self.drafted += sum(min(count + 1, drafts) for count in accepted)
        self.pace.learn(accepted if drafts else (), self._took, seconds, gained)


class DepthDrafter(Drafter):
    """Drafts at a depth of the model."""

    def __init__(self, head: DraftHead, exits: int, pace: Pace, depth: int, longest: int) -> None:
        super().__init__(pace, depth, longest)
        self._head, self.exits, self.share = head, exits, head.share

    def drafted_at(self, place: int, tape: Tape, dice: Dice | None) -> Draft:
        return self._head.draft(tape.advance(self.depth)[:, -1:], dice)

    def see(self, tokens: Tensor, logits: Tensor) -> None:
        self._head.see(tokens, logits)


class TextDrafter(Drafter):
    """Drafts what followed the same words earlier in the text; depth 0, since no block runs."""

    def __init__(self, prompt: Prompt, pace: Pace, longest: int) -> None:
        super().__init__(pace, 0, longest)
        self._device = prompt.ids.device
        self._texts = [
            Text(ids[real].tolist()) for ids, real in zip(prompt.ids, prompt.real, strict=True)
        ]
        self._read = [0] * len(self._texts)  # how many of the new tokens a text has

    def chance(self, out: Output) -> Callable[[], float]:
        return lambda: self._looked(out)

    def _looked(self, out: Output) -> float:
        for row in out.active:
            self._texts[row].extend(out.tokens[row][self._read[row] :])
            self._read[row] = len(out.tokens[row])
        self._found = Lookup([self._texts[row] for row in out.active], self.longest)
        sure = self._found.confidence(0)
        return sum(map(self.pace.known.chance, sure)) / len(sure)

    def drafted_at(self, place: int, tape: Tape, dice: Dice | None) -> Draft:
        return self._found.draft(place, self._device)


def _seconds(run: Callable[[], object]) -> float:
    start = clock()
    run()
    return clock() - start


class Drafters:
    """The drafters of one text, one per depth; the one with the most tokens per second drafts.

    tokens: the number of tokens asked for.
    longest: the most drafts in a round.
    vocabulary, words, always: as in `generate`.
    """

    def __init__(
        self,
        stream: ResidualStream,
        prompt: Prompt,
        top: int,
        depths: Sequence[int],
        sampling: Sampling,
        *,
        tokens: int,
        longest: int,
        vocabulary: int | None = None,
        words: Tensor | None = None,
        always: bool = False,
    ) -> None:
        self.ledger, self.lengths = Ledger(tokens), list[int]()
        self._prompt, self._top, self._always = prompt, top, always
        self._owner = unwrapped(stream.model)
        self._ways = {k: (top, k, sampling.do_sample, tokens >= PACKED_FROM) for k in depths}

        def drafter(depth: int) -> Drafter:
            pace = Pace(self.ledger, always=always, known=self._known(depth))
            if depth == 0:
                return TextDrafter(prompt, pace, longest)
            head = DraftHead(stream, depth, sampling, vocabulary, words)
            return DepthDrafter(head, len(stream.exits.get(depth, ())), pace, depth, longest)

        self._drafters = tuple(map(drafter, depths))
        self._ahead: dict[Drafter, tuple[Tensor, Tensor]] = {}

    def _known(self, depth: int) -> Experience:
        # Drafting always takes no plain steps, the unit of all costs.
        return Experience() if self._always else experience_of(self._owner, self._ways[depth])

    @property
    def likely(self) -> list[int]:
        """The depths of the model that will probably draft."""
        likely = (d for d in self._drafters if self._always or d.pace.known.lasting)
        return [d.depth for d in likely if d.depth]

    def begin(self, logits: Tensor, packing: float, reading: float) -> None:
        """Start after the prompt.

        logits: those after the prompt, which a drafter sees before its first draft.
        packing, reading: the seconds in which weights were reordered, those of likely exits
            included, and in which all blocks read the prompt.
        """
        self._ahead = dict.fromkeys(self._drafters, (self._prompt.ids[self._prompt.real], logits))
        self.ledger.before = packing + reading
        likely = self.likely
        beside = sum(d.exits for d in self._drafters if d.depth in likely)
        self.ledger.charge(packing * beside / (self._top + beside))
        for drafter in self._drafters:
            drafter.prepare(self._top, reading)

    def remember(self) -> None:
        """Keep what was learned for the next text."""
        for drafter in () if self._always else self._drafters:
            remember(self._owner, self._ways[drafter.depth], drafter.pace.known)

    @property
    def counts(self) -> dict[str, Any]:
        return {
            "draft_lengths": tuple(self.lengths),
            "drafted": sum(d.drafted for d in self._drafters),
            "accepted": sum(d.accepted for d in self._drafters),
            "draft_depths": {d.depth: len(d.lengths) for d in self._drafters},
        }

    def next(self, tape: Tape, out: Output) -> Drafter | None:
        """The drafter of this round; None for a plain step."""
        start = clock()
        best, kept, first = self._drafters[0], 0.0, self._drafters[0].chance(out)
        if len(self._drafters) > 1:
            chances = {d: d.chance(out) for d in self._drafters}
            found = {d: None if chance is None else chance() for d, chance in chances.items()}
            best = max(self._drafters, key=lambda d: d.pace.rate(found[d]))
            known, kept = found[best], self._kept(best)
            first = None if known is None else lambda: known
        drafts = best.pace.drafts(first, kept)
        self.ledger.charge(clock() - start)
        if not drafts:
            return None
        if best in self._ahead:
            start = clock()
            best.see(*self._ahead.pop(best))
            tape.catch_up(best.depth)
            self.ledger.charge(clock() - start)
        return best

    def _kept(self, best: Drafter) -> float:
        """What a dear way of drafting leaves for the cheaper ones, so that these are tried, too."""
        worst = [d.pace.worst for d in self._drafters]
        return max((one for one in worst if one < best.pace.worst), default=0.0)


def decode_with_drafts(
    tape: Tape,
    out: Output,
    tokens: Tensor,
    drafters: Drafters,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> None:
    """Decode in rounds, each with drafts and one verification, or a plain step.

    A round feeds the last certain token and all drafts. The full depth keeps the drafts before the
    first wrong one and adds a token of its own, so n drafts give 1 to n + 1 tokens, and no block
    sees a token twice.

    Each row has its own random numbers, so that a seed has the same text, whenever drafts are made.
    """
    dice = Dice.of(tape.rows, generator, tokens.device) if sampling.do_sample else None
    new, accepted = [[token] for token in tokens.tolist()], None
    ledger = drafters.ledger
    while True:
        going = out.emit(new, accepted)
        if not out.active:
            return
        tokens = tape.continued(going, tokens)
        if dice is not None and going is not None:
            dice.select(going)
        ledger.rows = tape.rows
        drafter = drafters.next(tape, out) if out.remaining > 1 else None
        if drafter is None:
            start = clock()
            tape.feed(tokens)
            tokens = sampling.draw_apart(tape.last_logits(tape.top), dice)
            new, accepted = [[token] for token in tokens.tolist()], None
            ledger.learn_plain(clock() - start, uneven=tape.uneven)
            continue
        drafts = drafter.draft(tape, tokens, out.remaining - 1, dice)
        start = clock()
        drafts = drafter.feed_last(tape, drafts)
        drafters.lengths.append(len(drafts))
        logits = tape.logits(tape.top)
        verdict = (
            judge_drawn(logits, drafts, sampling, dice) if dice else judge_greedy(logits, drafts)
        )
        accepted = verdict.accepted.tolist()
        kept = [count + 1 for count in accepted]
        if not drafter.pace.pays:
            # Rows of different lengths need a mask from then on: not before drafts pay off.
            kept = [min(kept)] * tape.rows
            if dice is not None:
                dice.keep(kept)
        tokens = _last(verdict, drafts, kept)
        tape.reject(kept, len(drafts) + 1)
        drafter.see(tokens, logits[:, -1])
        columns = [draft.tokens.tolist() for draft in drafts]
        drafter.learn(accepted, len(drafts), clock() - start, out.nearer(kept))
        new = [
            [column[row] for column in columns[: kept[row] - 1]] + [token]
            for row, token in enumerate(tokens.tolist())
        ]


def _last(verdict: Verdict, drafts: list[Draft], kept: list[int]) -> Tensor:
    """The last new token of each row: an accepted draft, if the row keeps fewer than it could."""
    place = min(kept) - 1
    if place == len(drafts):
        return verdict.following
    counts = torch.tensor(kept, device=verdict.accepted.device)
    return torch.where(verdict.accepted >= counts, drafts[place].tokens, verdict.following)
