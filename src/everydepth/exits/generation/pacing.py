"""When to draft, and how many tokens: by what drafts cost and gain on this machine.

The unit of all costs is a plain step: the time one token takes without drafts. A round of n drafts
costs `n d + v_n`: d for each draft, and v_n for one pass that verifies them all. It yields
`1 + S_1 + ... + S_n` tokens, where S_i is the chance that the first i drafts are right.

- `Experience`: the costs and chances seen so far, kept for the next text.
- `Ledger`: how much time drafting may still lose in this text.
- `Pace`: drafts while a gain is expected and the ledger can bear the worst case.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import inf
from weakref import WeakKeyDictionary

from torch import nn

SHARE = 0.0175  # of plain decoding's time that drafting may lose; what is not timed has 0.25 %
ADVANCE = 2.0  # plain steps; at most this much is lost before the text has grown to justify it
RECENT = 15  # measurements in a median, which ignores busy moments
TRUSTED = 3  # plain steps timed before the first draft; the very first one is slow
REMEASURED = 32  # rounds between timed plain steps, which take longer as the text grows
AHEAD = 8  # further drafts to consider: a second one may pay off only with a third
HOPED = 0.75  # the chance of a draft before any is known: high, so that drafts are tried
DOUBT = 2.0  # drafts that this hope counts for
MEMORY = 64  # recent drafts that count
PROVEN = 16  # plain steps' time before drafts are known to pay off
UNEVEN = 0.25  # what rows of different lengths may add to every later plain step
FADING = 512  # plain steps after which bad experience counts half, and drafts are tried again
RESTING = 4  # plain steps after a decision that holds for all of them, as deciding takes time, too


class Recent:
    """The median of the last few measurements; 0 if there are none."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=RECENT)
        self._median: float | None = 0.0

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        self._values.append(value)
        self._median = None

    @property
    def value(self) -> float:
        if self._median is None:
            ordered, half = sorted(self._values), len(self._values) // 2
            self._median = (ordered[half] + ordered[~half]) / 2
        return self._median


class Costs:
    """The cost of a draft, and of verifying 1, 2, ... drafts, in plain steps."""

    def __init__(self) -> None:
        self.draft = Recent()
        self._verify: list[Recent] = []

    @property
    def longest(self) -> int:
        """The most drafts that were ever verified at once."""
        return len(self._verify)

    def verified(self, drafts: int, cost: float) -> None:
        if drafts > self.longest:  # one more than ever before
            self._verify.append(Recent())
        self._verify[drafts - 1].add(cost)

    def verify(self, drafts: int) -> float:
        """The expected cost; beyond the longest, each draft adds what the last one added.

        The first draft says nothing about further ones: it often takes another kernel, once.
        """
        if not self._verify:
            return 1.0
        if drafts <= self.longest:
            return self._verify[drafts - 1].value
        last = self._verify[-1].value
        added = last - self._verify[-2].value if self.longest > 1 else 0.0
        return last + max(0.0, added) * (drafts - self.longest)

    def worst(self, drafts: int) -> float:
        """An upper bound: an untried draft costs at most a plain step."""
        known = min(drafts, self.longest)
        return (self._verify[known - 1].value if known else 1.0) + drafts - known


@dataclass
class Experience:
    """What is known about drafts from one depth."""

    costs: dict[int, Costs] = field(default_factory=dict[int, Costs])
    """By number of rows."""
    judged: float = 0.0
    right: float = 0.0
    sure: float = 0.0
    """Recent drafts that were judged, those that were right, and the sum of their confidences."""
    idle: int = 0
    """Plain steps since the last draft."""
    gained: float = 0.0
    over: float = 0.0
    """What drafts would gain if each row kept its own, and over how many tokens of plain steps and
    rounds, both in plain steps; the latest count most."""

    def of(self, rows: int) -> Costs:
        """The costs for this many rows; at first those for a few more rows, if known."""
        if rows not in self.costs:
            near = min((n for n in self.costs if rows < n <= 2 * rows), default=None)
            self.costs[rows] = Costs() if near is None else deepcopy(self.costs[near])
        return self.costs[rows]

    @property
    def lasting(self) -> bool:
        """Whether the last text was drafted to its end."""
        return self.over >= PROVEN and self.idle == 0

    @property
    def usual(self) -> float:
        """The chance that a draft is right."""
        return (self.right + HOPED * DOUBT) / (self.judged + DOUBT)

    def chance(self, confidence: float) -> float:
        """The chance that a draft of this confidence is right."""
        if not self.sure:
            return confidence
        mean = self.sure / self.judged
        return min(1.0, self.usual * confidence / mean)

    def went_on(self, gained: float, tokens: float) -> None:
        """Add a plain step or a round."""
        kept = 1 - 1 / MEMORY
        self.gained = self.gained * kept + gained
        self.over = self.over * kept + tokens

    def learn(self, right: bool, confidence: float) -> None:
        kept = 1 - 1 / MEMORY
        self.judged = self.judged * kept + 1
        self.right = self.right * kept + right
        self.sure = self.sure * kept + confidence


_experience: WeakKeyDictionary[nn.Module, dict[Hashable, Experience]] = WeakKeyDictionary()


def experience_of(model: nn.Module, way: Hashable) -> Experience:
    """A copy of what earlier texts have shown, since two texts may be written at once."""
    return deepcopy(_experience.get(model, {}).get(way, Experience()))


def remember(model: nn.Module, way: Hashable, found: Experience) -> None:
    """Let the next text of this model start with what is known; kept as long as the model is."""
    _experience.setdefault(model, {})[way] = found


class Ledger:
    """What drafting has lost against plain decoding, and what it may still lose, in plain steps.

    The loss never exceeds `SHARE` of the time that plain decoding takes for the whole text, or
    two plain steps if the text may end before that share is reached. Gains may be lost again.

    tokens: the number of tokens asked for.
    before: the seconds that plain decoding takes before its first step.
    """

    def __init__(self, tokens: int, before: float = 0.0) -> None:
        self._asked, self.before, self._done = tokens, before, 0.0
        self._lost = 0.0
        self._owed = 0.0  # seconds lost before a plain step was timed
        self.rows = 1
        self._plain: dict[int, Recent] = {}

    def expect(self, tokens: int) -> None:
        """Announce more tokens."""
        self._asked += tokens

    @property
    def plain(self) -> Recent:
        """Seconds of a plain step of `rows` rows."""
        found = self._plain.get(self.rows)
        if found is None:
            found = self._plain[self.rows] = Recent()
        return found

    def steps(self, seconds: float) -> float:
        """Seconds in plain steps."""
        return seconds / (self.plain.value or 1.0)

    def learn_plain(self, seconds: float, *, uneven: bool = False) -> None:
        """Add a plain step.

        uneven: drafts have left rows of different lengths; what that adds to the step is a loss.
        """
        if uneven and len(self.plain):
            self._lost += self.steps(seconds) - 1
        else:
            self.plain.add(seconds)
        self._done += 1

    def learn(self, tokens: float, seconds: float) -> None:
        """Add a round with drafts that brought the end nearer by `tokens`."""
        self._done += tokens
        if len(self.plain):
            self._lost += self.steps(seconds) - tokens

    def charge(self, seconds: float) -> None:
        """Add time that drafting takes outside its rounds."""
        if len(self.plain):
            self._lost += self.steps(seconds)
        else:
            self._owed += seconds

    @property
    def left(self) -> float:
        """The plain steps that may still be lost."""
        before, owed = self.steps(self.before), self.steps(self._owed)
        ahead = min(ADVANCE, SHARE * (self._asked + before))
        return max(SHARE * (self._done + before), ahead) - self._lost - owed


class Pace:
    """Decides before each round whether to draft, and after each draft whether to make another.

    ledger: shared by all depths that draft for one text.
    always: draft in every round, even at a loss.
    known: experience from earlier texts.
    """

    def __init__(
        self, ledger: Ledger, *, always: bool = False, known: Experience | None = None
    ) -> None:
        self._ledger, self._always = ledger, always
        self.known = Experience() if known is None else known
        self._rounds = self._rest = 0
        self._ahead, self._draft, self._first = 0.0, 1.0, 1.0

    def prepare(self, seconds: float, draft: float, first: float = 1.0) -> None:
        """Set what is known before the first draft.

        seconds: an estimate of the time that preparing the first draft takes.
        draft: an upper bound of the cost of a draft, in plain steps.
        first: an upper bound of what verifying one draft costs beyond a plain step before
            `bears` is asked.
        """
        self._ahead, self._draft, self._first = seconds, draft, first

    @property
    def _costs(self) -> Costs:
        return self.known.of(self._ledger.rows)

    @property
    def untried(self) -> bool:
        """Whether no draft was ever verified with this many rows, so that the cost is unknown."""
        return not self._always and self._costs.longest == 0

    def rate(self, first: float | None = None) -> float:
        """The expected tokens per plain step of a round of the best length.

        Bad experience fades while nothing is drafted, so that drafts are tried again.

        first: the chance of the first draft; None: the usual one.
        """
        if first == 0:
            return 0.0
        faded = 0.5 ** (self.known.idle / FADING)
        usual, costs = self.known.usual, self._costs
        if self._always and not costs.longest:
            return inf  # costs are in seconds then; without any there is nothing to compare
        draft = costs.draft.value  # free, as long as the cost is unknown: it has to be tried
        if usual < HOPED:
            usual = HOPED + faded * (usual - HOPED)
        alive = tokens = 1.0
        best = 0.0
        for n in range(1, AHEAD + 1):
            alive *= usual if n > 1 or first is None else first
            tokens += alive
            best = max(best, tokens / (n * draft + 1 + faded * (costs.verify(n) - 1)))
        return best

    @property
    def pays(self) -> bool:
        """Whether drafts are known to pay off, even if every plain step takes longer from now on:
        rows of different lengths need a mask."""
        known = self.known
        return self._always or (known.over >= PROVEN and known.gained > UNEVEN * known.over)

    @property
    def worst(self) -> float:
        """What the next round loses if its only draft is wrong."""
        return self._worst(1) + self._ledger.steps(self._ahead)

    def drafts(self, first: Callable[[], float] | None = None, kept: float = 0.0) -> bool:
        """Whether to draft in the next round.

        first: finds out the chance of the first draft; asked only where a draft is affordable, as
            finding out takes time, too. None: the usual one.
        kept: what the ledger keeps for others.
        """
        if self._always:
            return first is None or first() != 0
        if len(self._ledger.plain) < TRUSTED or self._rounds >= REMEASURED:
            self._rounds = 0
            return False
        self._rest -= 1
        # What is known of the first draft may change with every step; all else does not.
        rests = first is None and self._rest > 0
        affordable = not rests and self.worst <= self._ledger.left - kept
        drafts = affordable and self.rate(None if first is None else first()) > 1
        self.known.idle = 0 if drafts else self.known.idle + 1
        if not drafts:
            self._rest = self._rest if rests else RESTING
            self.known.went_on(0.0, 1.0)
        return drafts

    def _worst(self, drafts: int) -> float:
        """What a round loses if no draft is right."""
        if self.untried:
            return self._draft + self._first
        return drafts * self._costs.draft.value + self._costs.worst(drafts) - 1

    def begin(self, rows: int) -> None:
        """Start a round of drafts."""
        self._alive = [1.0] * rows
        self._confidence: list[Sequence[float]] = []
        self._ahead = 0.0

    def goes_on(self, confidence: Sequence[float]) -> bool:
        """Add the confidence of a draft in each row; returns whether to make another one."""
        self._confidence.append(confidence)
        for row, sure in enumerate(confidence):
            self._alive[row] *= self.known.chance(sure)
        costs, n = self._costs, len(self._confidence)
        if n > costs.longest:
            return False  # see what these cost first
        # If all of these are wrong, another round should still be possible.
        if not self._always and self._worst(n + 1) + self._worst(1) > self._ledger.left:
            return False
        draft, usual, here = costs.draft.value, self.known.usual, costs.verify(n)
        value = self.rate() if self._always else max(1.0, self.rate())
        alive = sum(self._alive) / len(self._alive)
        gained = 0.0
        for more in range(1, AHEAD + 1):
            alive *= usual
            gained += alive
            if gained > value * (more * draft + costs.verify(n + more) - here):
                return True
        return False

    def bears(self, ratio: float, drafting: Sequence[float]) -> bool:
        """Whether to verify a first draft although a few blocks took `ratio` times as long for it
        as for a plain step."""
        lost = self._ledger.steps(sum(drafting)) + ratio - 1
        if lost <= self._ledger.left:
            return True
        self._costs.verified(1, ratio)
        return False

    def learn(
        self,
        accepted: Sequence[int],
        drafting: Sequence[float],
        verifying: float,
        gained: int | None = None,
    ) -> None:
        """Learn from a round.

        accepted: by row, how many drafts were right; empty if the drafts were given up.
        drafting, verifying: seconds of each draft, and of the rest of the round.
        gained: how many tokens nearer the end is; None: the mean over rows.
        """
        costs, n = self._costs, len(drafting)
        for seconds in drafting:
            costs.draft.add(self._ledger.steps(seconds))
        if accepted:
            costs.verified(n, self._ledger.steps(verifying))
        for row, count in enumerate(accepted):
            for i in range(min(count + 1, n)):
                # Without any confidence it was none: the row only kept the others company.
                if self._confidence[i][row]:
                    self.known.learn(i < count, self._confidence[i][row])
        mean = 1 + sum(accepted) / max(1, len(accepted))
        self.known.went_on(mean - self._ledger.steps(sum(drafting) + verifying), mean)
        tokens = mean if gained is None else float(gained)
        self._ledger.learn(tokens, sum(drafting) + verifying)
        self._rounds += 1
