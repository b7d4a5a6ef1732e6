"""What a claim is, and when it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from everydepth_papers.claims.facts import Facts

Verdict = Literal["holds", "does not hold", "inconclusive", "not applicable"]
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement of a paper, and a number that decides it.

    test: how the number is made, in words; `value` makes it. It holds where the whole interval is
        `relation` the threshold, does not where none of it is, and is inconclusive in between.
    cells: by kind of network, the standard trainings it compares; their facts go to `value` in this
        order, one value a seed.
    needs: the groups of facts that `value` reads.
    own: why it cannot be asked of a single model that somebody brings; empty if it can.
    """

    name: str
    paper: str
    source: str
    statement: str
    test: str
    relation: Literal[">=", "<="]
    threshold: float
    cells: Mapping[str, tuple[str, ...]]
    value: Callable[..., float]
    needs: tuple[str, ...] = ("trace",)
    own: str = ""

    def verdict(self, low: float, high: float) -> Verdict:
        if not (math.isfinite(low) and math.isfinite(high)):
            return "inconclusive"
        if self.relation == "<=":
            low, high, threshold = -high, -low, -self.threshold
        else:
            threshold = self.threshold
        if low >= threshold:
            return "holds"
        return "does not hold" if high < threshold else "inconclusive"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The number of one claim on one kind of network (or on a model that somebody brought).

    values: one a seed, or one a part of the data. low, high: Student's 95 % interval of their mean;
        None for fewer than two.
    """

    on: str
    values: tuple[float, ...]
    low: float | None
    high: float | None
    verdict: Verdict
    note: str = ""

    @property
    def mean(self) -> float | None:
        return float(np.mean(self.values)) if self.values else None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A line of the ledger: a claim, what was measured, and what follows for all kinds together."""

    claim: Claim = field(repr=False)
    measured: tuple[Measured, ...]
    verdict: Verdict
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        claim = self.claim
        return {
            "name": claim.name,
            "paper": claim.paper,
            "source": claim.source,
            "statement": claim.statement,
            "test": claim.test,
            "relation": claim.relation,
            "threshold": claim.threshold,
            "verdict": self.verdict,
            "note": self.note,
            "measured": [
                {
                    "on": one.on,
                    "mean": one.mean,
                    "low": one.low,
                    "high": one.high,
                    "values": list(one.values),
                    "verdict": one.verdict,
                    "note": one.note,
                }
                for one in self.measured
            ],
        }


class NotApplicable(Exception):
    """Steers: a claim that cannot be asked here, with the reason."""


def measured(claim: Claim, on: str, values: Sequence[float]) -> Measured:
    """The interval of some values, and the verdict. Undefined values are left out, and said."""
    found = np.asarray(values, dtype=float)
    real = found[np.isfinite(found)]
    gone = f"{len(found) - len(real)} of {len(found)} undefined" if len(real) < len(found) else ""
    low, high = interval(real)
    few = "one value has no interval" if len(real) == 1 else ""
    return Measured(
        on=on,
        values=tuple(float(v) for v in real),
        low=None if math.isnan(low) else low,
        high=None if math.isnan(high) else high,
        verdict=claim.verdict(low, high),
        note="; ".join(filter(None, (gone, few))),
    )


def interval(values: np.ndarray) -> tuple[float, float]:
    """Student's interval of the mean: with three seeds a bootstrap would be far too narrow."""
    from scipy.stats import t

    if len(values) < 2:
        return math.nan, math.nan
    half = t.ppf(0.5 + CONFIDENCE / 2, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return float(values.mean() - half), float(values.mean() + half)


def entry(claim: Claim, found: Sequence[Measured], note: str = "") -> Entry:
    """Holds if it holds on every kind; does not, if it does not on one; else inconclusive."""
    verdicts = [one.verdict for one in found]
    if not verdicts:
        return Entry(claim=claim, measured=(), verdict="not applicable", note=note)
    if all(v == "holds" for v in verdicts):
        overall: Verdict = "holds"
    elif "does not hold" in verdicts:
        overall = "does not hold"
    else:
        overall = "inconclusive"
    where = [one.on for one in found if one.verdict == "does not hold"]
    if overall == "does not hold" and len(where) < len(found):
        note = "; ".join(filter(None, (f"not on {', '.join(where)}", note)))
    return Entry(claim=claim, measured=tuple(found), verdict=overall, note=note)


def ask(claim: Claim, *facts: Facts) -> float:
    """The claim's number, from facts of as many cells as it compares."""
    return float(claim.value(*facts))
