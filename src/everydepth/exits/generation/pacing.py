"""Whether and how far to draft, by what drafts, verifications and plain steps cost here."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

RECENT = 9  # measurements of which the median counts: a busy moment does not stay
WINDOW = 16  # rounds whose gain decides whether drafting pays: single ones depend on luck
TRUSTED = 2  # plain steps before the first draft: the first token of all is a slow one
RISKED = 0.015  # of the time plain decoding would take; so much may be lost in finding out
GUESSED = 0.4  # of a plain step, what the first draft of all may lose
STEEP = 0.75  # of a verification of one token, what each further one may add before it was seen
REMEASURED = 32  # rounds after which a plain step is taken again: it grows with the text


class Recent:
    """The median of the last few measurements."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=RECENT)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        self._values.append(value)

    @property
    def value(self) -> float:
        return median(self._values)


class ByLength:
    """Seconds by length: medians of each length seen, lines between and beyond them."""

    def __init__(self) -> None:
        self._seen: dict[int, Recent] = {}

    def __bool__(self) -> bool:
        return bool(self._seen)

    def add(self, length: int, value: float) -> None:
        self._seen.setdefault(length, Recent()).add(value)

    def at(self, length: int) -> float:
        known = sorted(self._seen)
        if len(known) == 1 or length <= known[0]:
            return self._seen[known[0]].value
        above = next((i for i, k in enumerate(known) if k >= length), len(known) - 1)
        low, high = known[above - 1], known[above]
        a, b = self._seen[low].value, self._seen[high].value
        return max(a, a + (b - a) * (length - low) / (high - low))

    def most(self, length: int) -> float:
        """What may have to be reckoned with, for a length beyond those seen."""
        known = max(self._seen)
        beyond = max(length - known, 0) * STEEP * self._seen[min(self._seen)].value
        return self.at(min(length, known)) + beyond


class Pace:
    """Decides before each round whether to draft, and after each draft whether to go on.

    With S_i the chance that the first i drafts are all accepted, a round of n drafts gives
    `E_n = S_0 + ... + S_{n-1}` tokens (the last draft, if wrong, is replaced at no cost) and costs
    `C_n = verify_n + n draft`. Another draft pays if `S_n / C' > E_n / C_n` with C' what it adds.
    The chance of a draft is learnt while decoding, for each tenth of its confidence, as are all
    costs.

    What drafting has lost against plain steps so far is kept below a small share of what plain
    decoding of all tokens would take: so it can never be much slower, wherever it runs.

    always: draft in every round, whatever it costs.
    """

    BINS = 10

    def __init__(self, tokens: int, *, always: bool = False) -> None:
        self._tokens, self._always = tokens, always
        self._plain, self._draft, self._verify = Recent(), Recent(), ByLength()
        self._lost = 0.0
        self._rounds = self._since = self._longest = 0
        self._waits, self._failed = 0, 0
        # Two imagined drafts a bin say that the confidence is right.
        centres = [(i + 0.5) / self.BINS for i in range(self.BINS)]
        self._tried, self._right = [2.0] * self.BINS, [2 * c for c in centres]
        self._gains: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    @property
    def rate(self) -> float:
        """Tokens a second of recent rounds; infinite before the first, to be tried."""
        if not self._gains:
            return float("inf")
        tokens, seconds = (sum(column) for column in zip(*self._gains, strict=True))
        return tokens / seconds

    def drafts(self) -> bool:
        """Whether the next round drafts."""
        if self._always:
            return True
        if len(self._plain) < TRUSTED or self._since >= REMEASURED:
            self._since = 0
            return False
        plain = self._plain.value
        if not self._rounds:
            return GUESSED * plain <= self._left
        # A round of one draft gives one token and cannot pay: it shows what drafts cost.
        if self._longest > 1:
            if self.rate * plain >= 1:
                return True
            # It did not pay lately: try again, ever more rarely, while the risk can be borne.
            self._waits -= 1
            if self._waits >= 0:
                return False
        return self._worst(2) <= self._left

    @property
    def _left(self) -> float:
        """Seconds that may still be lost."""
        return RISKED * self._tokens * self._plain.value - self._lost

    def _worst(self, drafts: int) -> float:
        """What a round loses if no draft is right."""
        return drafts * self._draft.value + self._verify.most(drafts) - self._plain.value

    def begin(self, rows: int) -> None:
        self._alive = [1.0] * rows
        self._expected = 0.0
        self._bins: list[list[int]] = []

    def goes_on(self, confidence: Sequence[float]) -> bool:
        """Note the confidences of one draft a row; True if another draft pays."""
        bins = [min(int(c * self.BINS), self.BINS - 1) for c in confidence]
        self._bins.append(bins)
        self._expected += sum(self._alive) / len(self._alive)
        for row, i in enumerate(bins):
            self._alive[row] *= self._right[i] / self._tried[i]
        n = len(self._bins)
        if not self._verify or not len(self._draft):
            return False  # what one costs has to be seen before two are made
        if not self._always and self._worst(n + 1) > self._left:
            return False
        draft, verify = self._draft.value, self._verify.at(n)
        more = draft + self._verify.at(n + 1) - verify
        alive = sum(self._alive) / len(self._alive)
        return alive * (n * draft + verify) > self._expected * more

    def learn_plain(self, seconds: float) -> None:
        """A step without drafts took so long."""
        self._plain.add(seconds)

    def learn(self, accepted: Sequence[int], drafting: Sequence[float], verifying: float) -> None:
        """What became of the drafts since `begin`, and what they and judging them took."""
        n = len(self._bins)
        for row, count in enumerate(accepted):
            for step, bins in enumerate(self._bins[: count + 1]):
                self._tried[bins[row]] += 1
                self._right[bins[row]] += step < count
        for seconds in drafting:
            self._draft.add(seconds)
        self._verify.add(n, verifying)
        took = sum(drafting) + verifying
        gained = sum(min(count + 1, n) for count in accepted) / len(accepted)
        if n > 1 >= self._longest:
            self._gains.clear()
        self._longest = max(self._longest, n)
        self._gains.append((gained, took))
        self._rounds += 1
        self._since += 1
        if not len(self._plain):
            return
        self._lost += took - gained * self._plain.value
        pays = self.rate * self._plain.value >= 1
        self._failed = 0 if pays else self._failed + 1
        self._waits = 0 if pays else min(4 * 2**self._failed, 256)
