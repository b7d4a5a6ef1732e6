"""What a claim is, and when it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from everydepth.ablations import interval
from everydepth_papers.claims.facts import Facts
from everydepth_papers.verdict import Verdict, of_all, of_interval


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement of a paper, and a number that decides it.

    test: how the number is made, in words; `value` makes it. It holds where the whole interval is
        `relation` the threshold, does not where none of it is, and is inconclusive in between.
    cells: by kind of network, the standard trainings it compares; their facts go to `value` in this
        order, one value a seed.
    needs: the groups of facts that `value` reads.
    own: why it cannot be asked of your own single model; empty if it can.
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
        if self.relation == "<=":
            return of_interval(low, high, most=self.threshold)
        return of_interval(low, high, least=self.threshold)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The number of one claim on one kind of network (or on your own model).

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


def measured(claim: Claim, on: str, values: Sequence[float]) -> Measured:
    """The interval of some values, and the verdict. Undefined values are left out, and said."""
    found = np.asarray(values, dtype=float)
    real = found[np.isfinite(found)]
    gone = f"{len(found) - len(real)} of {len(found)} undefined" if len(real) < len(found) else ""
    low, high = interval(real)  # Student's: of three seeds a bootstrap would be far too narrow
    few = "one value has no interval" if len(real) == 1 else ""
    return Measured(
        on=on,
        values=tuple(float(v) for v in real),
        low=None if math.isnan(low) else low,
        high=None if math.isnan(high) else high,
        verdict=claim.verdict(low, high),
        note="; ".join(filter(None, (gone, few))),
    )


def entry(claim: Claim, found: Sequence[Measured], note: str = "") -> Entry:
    """The claim on all kinds of networks together."""
    overall = of_all(one.verdict for one in found)
    where = [one.on for one in found if one.verdict == "does not hold"]
    if overall == "does not hold" and len(where) < len(found):
        note = "; ".join(filter(None, (f"not on {', '.join(where)}", note)))
    return Entry(claim=claim, measured=tuple(found), verdict=overall, note=note)


def ask(claim: Claim, *facts: Facts) -> float:
    """The claim's number, from facts of as many cells as it compares."""
    return float(claim.value(*facts))
