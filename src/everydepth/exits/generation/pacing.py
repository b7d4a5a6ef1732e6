"""Whether and how far to draft, by what drafts, verifications and plain steps cost here."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

RECENT = 9  # measurements of which the median counts: a busy moment does not stay
STEPS = 33  # the same of plain steps, by which everything else is judged
WINDOW = 16  # rounds whose gain decides whether drafting pays: single ones depend on luck
TRUSTED = 3  # plain steps before the first draft: the first token of all is a slow one
REMEASURED = 32  # rounds after which a plain step is taken again: it grows with the text
AHEAD = 8  # further drafts that are weighed: a second one may pay only with a third
RISKED = 0.0075  # of the time plain decoding would have taken so far
IN_ADVANCE = 2  # plain steps, or as many as are that share of all tokens asked for


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


class ByLength:
    """Seconds by length: medians of each length seen, lines between and beyond them."""

    def __init__(self) -> None:
        self._seen: dict[int, Recent] = {}
        self._found: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._seen)

    def add(self, length: int, value: float) -> None:
        self._seen.setdefault(length, Recent()).add(value)
        self._found = {}

    def at(self, length: int) -> float:
        if length not in self._found:
            self._found[length] = self._between(length)
        return self._found[length]

    def most(self, length: int) -> float:
        """What has to be reckoned with: beyond the lengths seen, that of single tokens."""
        return self.at(min(length, max(self._seen))) + self._beyond(length) * self.at(1)

    def _beyond(self, length: int) -> int:
        return max(length - max(self._seen), 0)

    def _between(self, length: int) -> float:
        known = sorted(self._seen)
        low, high = next(((a, b) for a, b in pairwise(known) if length <= b), (known[-2:] * 2)[:2])
        a, b = self._seen[low].value, self._seen[high].value
        if length <= low or low == high:
            return a
        return max(a, a + (b - a) * (length - low) / (high - low))


class Ledger:
    """What drafting has lost against plain steps, and what it may still lose.

    At any time that is a share (`RISKED`) of what plain decoding would have taken so far, and the
    same share of all that is asked for in advance, but at most two plain steps. So a text never
    takes more than one and a half percent longer than plain decoding, wherever it runs, and what is
    not timed here has the rest of two percent; one that ends before its time, that share and two
    steps. What drafting won may be lost again.

    tokens: so many are asked for.
    """

    def __init__(self, tokens: int) -> None:
        self._asked, self._done, self._lost = tokens, 0.0, 0.0
        self.plain = Recent(STEPS)

    def expect(self, tokens: int) -> None:
        """So many more tokens are asked for."""
        self._asked += tokens

    def learn_plain(self, seconds: float, *, uneven: bool = False) -> None:
        """A step without drafts took so long; uneven: drafts have left rows of unequal lengths, and
        what that adds to the step is their loss."""
        if uneven and len(self.plain):
            self._lost += seconds - self.plain.value
        else:
            self.plain.add(seconds)
        self._done += 1

    def learn(self, tokens: float, seconds: float) -> None:
        """A round with drafts brought the end nearer by so many tokens."""
        self._done += tokens
        if len(self.plain):
            self._lost += seconds - tokens * self.plain.value

    def charge(self, seconds: float) -> None:
        """What drafting takes beside its rounds."""
        self._lost += seconds

    @property
    def left(self) -> float:
        """Seconds that may still be lost."""
        advance = min(IN_ADVANCE, RISKED * self._asked)
        return self.plain.value * (RISKED * self._done + advance) - self._lost


class Pace:
    """Decides before each round whether to draft, and after each draft whether to go on.

    With S_i the chance that the first i drafts are all accepted, a round of n drafts gives
    `E_n = S_0 + ... + S_{n-1}` tokens (the last draft, if wrong, is replaced at no cost) and costs
    `C_n = verify_n + n draft`. From n drafts it pays to go on to m if `E_m - E_n` tokens take
    longer than `C_m - C_n` otherwise: at the rate of recent rounds or of plain steps, whichever is
    higher. The chance of a draft is learned while decoding, for each tenth of its confidence, as
    are all costs.

    A round is only begun, and only prolonged, if the ledger could bear that no draft is right.

    ledger: shared by all depths that draft for one text.
    always: draft in every round, whatever it costs.
    """

    BINS = 10

    def __init__(self, ledger: Ledger, *, always: bool = False) -> None:
        self._ledger, self._always = ledger, always
        self._draft, self._verify = Recent(), ByLength()
        self._since = self._waits = self._failed = 0
        # Two imagined drafts a bin say that the confidence is right.
        centers = [(i + 0.5) / self.BINS for i in range(self.BINS)]
        self._tried, self._right = [2.0] * self.BINS, [2 * c for c in centers]
        self._gains: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._chances: deque[float] = deque(maxlen=WINDOW)

    @property
    def rate(self) -> float:
        """Tokens a second of recent rounds; infinite before the first, to be tried."""
        if not self._gains:
            return float("inf")
        tokens, seconds = (sum(column) for column in zip(*self._gains, strict=True))
        return tokens / seconds

    @property
    def pays(self) -> bool:
        """Whether recent rounds gave more tokens a second than plain steps."""
        return self._always or (bool(self._gains) and self.rate * self._ledger.plain.value > 1)

    def drafts(self) -> bool:
        """Whether the next round drafts."""
        if self._always:
            return True
        plain = self._ledger.plain
        if len(plain) < TRUSTED or self._since >= REMEASURED:
            self._since = 0
            return False
        if self._waits > 0:  # it did not pay lately: try again, ever more rarely
            self._waits -= 1
            return False
        return self._worst(1) <= self._ledger.left

    def _worst(self, drafts: int) -> float:
        """What a round loses if no draft is right."""
        plain = self._ledger.plain.value
        if not self._verify:
            return plain  # a draft is a part of a plain step, and verifying it another
        return drafts * self._draft.value + self._verify.most(drafts) - plain

    def begin(self, rows: int) -> None:
        self._alive = [1.0] * rows
        self._bins: list[list[int]] = []

    def goes_on(self, confidence: Sequence[float]) -> bool:
        """Note the confidences of one draft a row; True if another draft pays."""
        bins = [min(int(c * self.BINS), self.BINS - 1) for c in confidence]
        self._bins.append(bins)
        for row, i in enumerate(bins):
            self._alive[row] *= self._right[i] / self._tried[i]
        if not self._verify:
            return False  # what one costs has to be seen before two are made
        n, draft, verify = len(self._bins), self._draft.value, self._verify
        alive = sum(self._alive) / len(self._alive)
        chance = sum(self._chances) / len(self._chances) if self._chances else alive
        here, gained, rate = verify.at(n), 0.0, self._value
        for m in range(n + 1, n + 1 + AHEAD):
            if not self._always and self._worst(m) > self._ledger.left:
                return False
            gained += alive
            alive *= chance
            if gained > rate * ((m - n) * draft + verify.at(m) - here):
                return True
        return False

    @property
    def _value(self) -> float:
        """Tokens a second that there are otherwise."""
        plain = self._ledger.plain
        recent = self.rate if self._gains else 0.0
        return max(recent, 1 / plain.value if len(plain) and plain.value else 0.0)

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
        n, rows, known = len(self._bins), len(accepted), bool(self._verify)
        for row, count in enumerate(accepted):
            for step, bins in enumerate(self._bins[: count + 1]):
                self._tried[bins[row]] += 1
                self._right[bins[row]] += step < count
        for seconds in drafting:
            self._draft.add(seconds)
        self._verify.add(n, verifying)
        took = sum(drafting) + verifying
        mean = sum(min(count + 1, n) for count in accepted) / rows
        self._ledger.learn(mean if gained is None else float(gained), took)
        self._since += 1
        if not known:
            return  # one draft, whatever its confidence: it shows what drafts cost
        self._gains.append((self._expected(rows), took))
        pays = self.rate * self._ledger.plain.value >= 1
        self._failed = 0 if pays else self._failed + 1
        self._waits = 0 if pays else min(4 * 2**self._failed, 256)

    def _expected(self, rows: int) -> float:
        """Tokens a row that such a round gives: chances depend less on luck than what it gave."""
        alive, tokens = [1.0] * rows, 0.0
        for bins in self._bins:
            tokens += sum(alive)
            for row, i in enumerate(bins):
                chance = self._right[i] / self._tried[i]
                alive[row] *= chance
                self._chances.append(chance)
        return tokens / rows
