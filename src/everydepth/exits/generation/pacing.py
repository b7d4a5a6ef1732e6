"""Whether and how far to draft, by what drafts, verifications and plain steps cost here."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from weakref import WeakKeyDictionary

from torch import nn

RECENT = 9  # measurements of which the median counts: a busy moment does not stay
STEPS = 33  # the same of plain steps, by which everything else is judged
WINDOW = 16  # rounds whose gain decides whether drafting pays: single ones depend on luck
TRUSTED = 3  # plain steps before the first draft: the first token of all is a slow one
REMEASURED = 32  # rounds after which a plain step is taken again: it grows with the text
AHEAD = 8  # further drafts that are weighed: a second one may pay only with a third
RISKED = 0.0075  # of the time plain decoding would have taken so far
IN_ADVANCE = 2  # plain steps, or as many as are that share of all tokens asked for
REMEMBERED = 32  # drafts of each confidence that count in the next text
BINS = 10  # of confidence


class Recent:
    """The median of the last few measurements."""

    def __init__(self, count: int = RECENT) -> None:
        self._values: deque[float] = deque(maxlen=count)
        self._median: float | None = 0.0

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        self._values.append(value)
        self._median = None

    @property
    def value(self) -> float:
        if self._median is None:  # every step adds one, few are asked for it
            self._median = median(self._values)
        return self._median

    def settle(self) -> None:
        """Keep what is known as a single measurement, which newer ones soon outweigh."""
        if self._values:
            known = self.value
            self._values.clear()
            self.add(known)


class ByLength:
    """Costs by length: medians of each length seen, lines between and beyond them.

    What several cost beyond one is often another kernel, once: it says nothing of further ones.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Recent] = {}
        self._found: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._seen)

    @property
    def longest(self) -> int:
        return max(self._seen, default=0)

    def add(self, length: int, value: float) -> None:
        self._seen.setdefault(length, Recent()).add(value)
        self._found = {}

    def settle(self) -> None:
        for seen in self._seen.values():
            seen.settle()

    def at(self, length: int) -> float:
        if length not in self._found:
            self._found[length] = self._between(length)
        return self._found[length]

    def _between(self, length: int) -> float:
        known = sorted(self._seen)
        low, high = next(((a, b) for a, b in pairwise(known) if length <= b), (known[-2:] * 2)[:2])
        a, b = self._seen[low].value, self._seen[high].value
        if length <= low or low == high:
            return a
        if length > high and len(known) == 2:
            return max(a, b)
        return max(a, a + (b - a) * (length - low) / (high - low))


@dataclass
class Costs:
    """In plain steps of as many rows: one draft, verifying some, and the first blocks of verifying
    one."""

    draft: Recent = field(default_factory=Recent)
    verify: ByLength = field(default_factory=ByLength)
    first_blocks: Recent = field(default_factory=Recent)

    def settle(self) -> None:
        self.draft.settle()
        self.verify.settle()
        self.first_blocks.settle()


def _imagined() -> tuple[list[float], list[float]]:
    """Two drafts a bin that say that the confidence is right."""
    return [2.0] * BINS, [2 * (i + 0.5) / BINS for i in range(BINS)]


@dataclass
class Experience:
    """What drafts of one depth cost and were worth, also in texts before."""

    costs: dict[int, Costs] = field(default_factory=dict[int, Costs])
    """By the number of rows."""
    chances: tuple[list[float], list[float]] = field(default_factory=_imagined)
    """By tenths of confidence: drafts tried, and those that were right."""
    gains: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Tokens and plain steps of recent rounds."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Chances of recent drafts."""
    failed: int = 0
    waits: int = 0

    def of(self, rows: int) -> Costs:
        """What is known of so many rows; at first, what is of the next number of them."""
        if rows not in self.costs:
            near = min(self.costs, key=lambda known: abs(known - rows), default=None)
            self.costs[rows] = Costs() if near is None else deepcopy(self.costs[near])
            self.costs[rows].settle()
        return self.costs[rows]

    def settle(self) -> None:
        """Make room for what the next text shows; one round of it may tell otherwise."""
        self.waits = 0
        for costs in self.costs.values():
            costs.settle()
        tried, right = self.chances
        for i, count in enumerate(tried):
            if count > REMEMBERED:
                tried[i], right[i] = float(REMEMBERED), right[i] * REMEMBERED / count


_experience: WeakKeyDictionary[nn.Module, dict[Hashable, Experience]] = WeakKeyDictionary()


def experience_of(model: nn.Module, how: Hashable) -> Experience:
    """A copy of what earlier texts have shown: two may be written at once."""
    found = deepcopy(_experience.get(model, {}).get(how, Experience()))
    found.settle()
    return found


def remember(model: nn.Module, how: Hashable, found: Experience) -> None:
    """Let the next text of the same model begin with this; kept as long as the model is."""
    _experience.setdefault(model, {})[how] = found


class Ledger:
    """What drafting has lost against plain steps, and what it may still lose, in plain steps.

    At any time that is a share (`RISKED`) of what plain decoding would have taken so far, and the
    same share of all that is asked for in advance, but at most two plain steps. So a text never
    takes more than one and a half percent longer than plain decoding, wherever it runs, and what is
    not timed here has the rest of two percent; one that ends before its time, that share and two
    steps. What drafting won may be lost again.

    tokens: so many are asked for.
    """

    def __init__(self, tokens: int) -> None:
        self._asked, self._done, self._lost = tokens, 0.0, 0.0
        self.rows = 1
        self._plain: dict[int, Recent] = {}

    def expect(self, tokens: int) -> None:
        """So many more tokens are asked for."""
        self._asked += tokens

    @property
    def plain(self) -> Recent:
        """Seconds of a plain step of as many rows as there are."""
        if self.rows not in self._plain:
            self._plain[self.rows] = Recent(STEPS)
        return self._plain[self.rows]

    def steps(self, seconds: float) -> float:
        """How many plain steps take so long; as long as none was taken, those of a second."""
        return seconds / (self.plain.value or 1.0)

    def learn_plain(self, seconds: float, *, uneven: bool = False) -> None:
        """A step without drafts took so long; uneven: drafts have left rows of unequal lengths, and
        what that adds to the step is their loss."""
        if uneven and len(self.plain):
            self._lost += self.steps(seconds) - 1
        else:
            self.plain.add(seconds)
        self._done += 1

    def rest(self, steps: int) -> None:
        """So many plain steps follow that nobody times."""
        self._done += steps

    def learn(self, tokens: float, seconds: float) -> None:
        """A round with drafts brought the end nearer by so many tokens."""
        self._done += tokens
        if len(self.plain):
            self._lost += self.steps(seconds) - tokens

    def charge(self, seconds: float) -> None:
        """What drafting takes beside its rounds."""
        if len(self.plain):
            self._lost += self.steps(seconds)

    @property
    def left(self) -> float:
        """Plain steps that may still be lost."""
        return RISKED * self._done + min(IN_ADVANCE, RISKED * self._asked) - self._lost


class Pace:
    """Decides before each round whether to draft, and after each draft whether to go on.

    With S_i the chance that the first i drafts are all accepted, a round of n drafts gives
    `E_n = S_0 + ... + S_{n-1}` tokens (the last draft, if wrong, is replaced at no cost) and costs
    `C_n = verify_n + n draft`. From n drafts it pays to go on to m if `E_m - E_n` tokens take
    longer than `C_m - C_n` otherwise: at the rate of recent rounds or of plain steps, whichever is
    higher. The chance of a draft is learned while decoding, for each tenth of its confidence, as
    are all costs.

    A round is only begun, and only prolonged, if the ledger could bear that no draft is right.
    Nobody knows what it costs to verify more drafts than ever before: anything up to as many plain
    steps. So the first blocks are run and timed, and if all of them would cost too much, the drafts
    that are too many are given up (`looks`, `affordable`): only those blocks are at risk.

    ledger: shared by all depths that draft for one text.
    always: draft in every round, whatever it costs.
    known: from earlier texts.
    looking: whether whoever verifies asks `affordable`; else it is reckoned with the worst.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        always: bool = False,
        known: Experience | None = None,
        looking: bool = False,
    ) -> None:
        self._ledger, self._always, self._looking = ledger, always, looking
        self.known = Experience() if known is None else known
        self._since = 0
        self._ahead, self._extra = 0.0, 1.0

    def prepare(self, seconds: float, extra: float = 1.0) -> None:
        """What is known before the first draft.

        seconds: what has to be done before it will take about so long.
        extra: plain steps that a round of one draft takes beyond one, at most. The draft is a part
            of a plain step, and verifying it the rest: there is a second readout.
        """
        self._ahead, self._extra = seconds, extra

    @property
    def _costs(self) -> Costs:
        return self.known.of(self._ledger.rows)

    @property
    def rate(self) -> float:
        """Tokens per plain step of recent rounds; infinite before the first, to be tried."""
        if not self.known.gains:
            return float("inf")
        tokens, steps = (sum(column) for column in zip(*self.known.gains, strict=True))
        return tokens / steps

    @property
    def pays(self) -> bool:
        """Whether recent rounds gave more tokens than plain steps would have."""
        return self._always or (bool(self.known.gains) and self.rate > 1)

    def drafts(self) -> bool:
        """Whether the next round drafts."""
        if self._always:
            return True
        if not self._knows_plain:
            self._since = 0
            return False
        if self.known.waits > 0:  # it did not pay lately: try again, ever more rarely
            self.known.waits -= 1
            return False
        return self._lacking <= 0

    @property
    def _knows_plain(self) -> bool:
        return len(self._ledger.plain) >= TRUSTED and self._since < REMEASURED

    @property
    def _lacking(self) -> float:
        """How much more the ledger has to bear for a round to begin."""
        return self._worst(1) + self._ledger.steps(self._ahead) - self._ledger.left

    def rest(self) -> int:
        """Plain steps after a plain step for which there will be nothing to decide."""
        if not self._knows_plain:
            return 0
        steps = self.known.waits or math.floor(self._lacking / RISKED)
        steps = max(0, min(steps, REMEASURED))
        self.known.waits = max(0, self.known.waits - steps)
        return steps

    def _worst(self, drafts: int) -> float:
        """What a round loses if no draft is right."""
        costs = self._costs
        if not costs.verify:
            return self._extra
        known = min(drafts, costs.verify.longest)
        found = drafts * costs.draft.value + costs.verify.at(known) - 1
        each = costs.first_blocks.value if self._can_look else costs.verify.at(1)
        return found + (drafts - known) * each

    @property
    def _can_look(self) -> bool:
        return self._looking and len(self._costs.first_blocks) > 0

    def begin(self, rows: int) -> None:
        self._alive = [1.0] * rows
        self._bins: list[list[int]] = []
        self._ahead = 0.0

    def goes_on(self, confidence: Sequence[float]) -> bool:
        """Note the confidences of one draft a row; True if another draft pays."""
        tried, right = self.known.chances
        bins = [min(int(c * BINS), BINS - 1) for c in confidence]
        self._bins.append(bins)
        for row, i in enumerate(bins):
            self._alive[row] *= right[i] / tried[i]
        costs = self._costs
        if not costs.verify:
            return False  # what one costs has to be seen before two are made
        n, draft, verify = len(self._bins), costs.draft.value, costs.verify
        alive, recent = sum(self._alive) / len(self._alive), self.known.recent
        chance = sum(recent) / len(recent) if recent else alive
        here, gained, left = verify.at(n), 0.0, self._ledger.left
        value = max(self.rate if self.known.gains else 0.0, 0.0 if self._always else 1.0)
        for m in range(n + 1, n + 1 + AHEAD):
            if not self._always and self._worst(m) > left:
                return False
            gained += alive
            alive *= chance
            if gained > value * ((m - n) * draft + verify.at(m) - here):
                return True
        return False

    def looks(self, drafts: int) -> bool:
        """Whether to time the first blocks that verify so many drafts, and to ask `affordable`."""
        if self._always or not self._looking:
            return False
        costs = self._costs
        return drafts > costs.verify.longest or (drafts == 1 and len(costs.first_blocks) < RECENT)

    def affordable(self, drafts: int, seconds: float) -> int:
        """How many of the drafts to verify, after their first blocks took so long."""
        costs, took = self._costs, self._ledger.steps(seconds)
        if drafts == 1:
            costs.first_blocks.add(took)
        if drafts == 1 or not self._can_look:
            return drafts
        expected = costs.verify.at(1) * took / costs.first_blocks.value
        if drafts * costs.draft.value + expected - 1 <= self._ledger.left:
            return drafts
        kept = costs.verify.longest
        costs.verify.add(drafts, expected)
        del self._bins[kept:]
        return kept

    def learn(
        self,
        accepted: Sequence[int],
        drafting: Sequence[float],
        verifying: float,
        gained: int | None = None,
    ) -> None:
        """What became of the drafts since `begin`, and what they and judging them took.

        gained: by how many tokens the end has come nearer, where it is that of the slowest row;
            None: the mean of all rows.
        """
        costs, steps = self._costs, self._ledger.steps
        tried, right = self.known.chances
        n, rows, known = len(self._bins), len(accepted), bool(costs.verify)
        for row, count in enumerate(accepted):
            for step, bins in enumerate(self._bins[: count + 1]):
                tried[bins[row]] += 1
                right[bins[row]] += step < count
        for seconds in drafting:
            costs.draft.add(steps(seconds))
        costs.verify.add(n, steps(verifying))
        took = sum(drafting) + verifying
        mean = sum(min(count + 1, n) for count in accepted) / rows
        self._ledger.learn(mean if gained is None else float(gained), took)
        self._since += 1
        if not known:
            return  # one draft, whatever its confidence: it shows what drafts cost
        self.known.gains.append((self._expected(rows), steps(took)))
        pays = self.rate >= 1
        self.known.failed = 0 if pays else self.known.failed + 1
        self.known.waits = 0 if pays else min(4 * 2**self.known.failed, 256)

    def _expected(self, rows: int) -> float:
        """Tokens a row that such a round gives: chances depend less on luck than what it gave."""
        tried, right = self.known.chances
        alive, tokens = [1.0] * rows, 0.0
        for bins in self._bins:
            tokens += sum(alive)
            for row, i in enumerate(bins):
                chance = right[i] / tried[i]
                alive[row] *= chance
                self.known.recent.append(chance)
        return tokens / rows
