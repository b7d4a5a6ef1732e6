"""What a claim is, and when it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from everydepth_papers.claims.facts import Facts, Missing
from everydepth_papers.premise import Checked, Premise, counting, failing
from everydepth_papers.statistics import interval
from everydepth_papers.verdict import Verdict, of_all, of_interval, of_worst


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement of a paper, and a number that decides it.

    test: how the number is made, in words; `value` makes it. It holds where the whole interval is
        `relation` the threshold, does not where none of it is, and is inconclusive in between.
    worst: the statement is about every case (a theorem, "in all layers"), so the largest (smallest)
        value decides, not an interval of the mean.
    premises: what must be true of the networks for the statement to be about them; they get the
        same facts as `value`. A seed where one fails does not count.
    cells: by kind of network, the standard runs it compares; their facts go to `value` in this
        order, one value per seed.
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
    premises: tuple[Premise, ...] = ()
    worst: bool = False
    needs: tuple[str, ...] = ("trace",)
    own: str = ""

    def verdict(self, low: float, high: float) -> Verdict:
        least, most = self._wanted
        return of_interval(low, high, least=least, most=most)

    def of_worst(self, values: Sequence[float]) -> Verdict:
        least, most = self._wanted
        return of_worst(values, least=least, most=most)

    @property
    def _wanted(self) -> tuple[float, float]:
        """The smallest and the largest number for which the claim holds."""
        if self.relation == "<=":
            return -math.inf, self.threshold
        return self.threshold, math.inf


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The number of one claim on one kind of network (or on your own model).

    values: one per seed, or per part of the data, of those that count. low, high: Student's 95 %
        interval of their mean, or the smallest and largest where the worst decides; None for fewer
        than two. premises: each with its figure in every seed.
    """

    on: str
    values: tuple[float, ...]
    low: float | None
    high: float | None
    verdict: Verdict
    note: str = ""
    premises: tuple[Checked, ...] = ()

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
            "worst": claim.worst,
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
                    "premises": [checked.to_json() for checked in one.premises],
                }
                for one in self.measured
            ],
        }


def measured(
    claim: Claim, on: str, values: Sequence[float], premises: Sequence[Checked] = ()
) -> Measured:
    """The interval of those values that count, and the verdict. Undefined ones are left out."""
    counted = counting(premises, len(values))
    found = np.asarray([v for v, yes in zip(values, counted, strict=True) if yes], dtype=float)
    real = found[np.isfinite(found)]
    gone = f"{len(found) - len(real)} of {len(found)} undefined" if len(real) < len(found) else ""
    few = "one value has no interval" if len(real) == 1 else ""
    low, high = math.nan, math.nan
    if len(real) > 1:
        # Student's: of a few seeds a bootstrap would be far too narrow.
        low, high = (real.min(), real.max()) if claim.worst else interval(real)
    worst = claim.worst and len(real) > 0
    judged = claim.of_worst(real.tolist()) if worst else claim.verdict(low, high)
    return Measured(
        on=on,
        values=tuple(float(v) for v in real),
        low=None if math.isnan(low) else float(low),
        high=None if math.isnan(high) else float(high),
        verdict=failing(premises, len(values)) or judged,
        note="; ".join(filter(None, (gone, few))),
        premises=tuple(premises),
    )


def entry(claim: Claim, found: Sequence[Measured], note: str = "") -> Entry:
    """The claim on all kinds of networks together."""
    overall = of_all(one.verdict for one in found)
    where = [one.on for one in found if one.verdict == "does not hold"]
    if overall == "does not hold" and len(where) < len(found):
        note = "; ".join(filter(None, (f"not on {', '.join(where)}", note)))
    return Entry(claim=claim, measured=tuple(found), verdict=overall, note=note)


def ask(claim: Claim, on: str, cases: Sequence[tuple[Facts, ...]]) -> Measured:
    """Compute the number of a claim in each case, given the facts of its networks, and judge it."""
    values = [float(claim.value(*case)) for case in cases]
    figures = [[_figure(premise, case) for case in cases] for premise in claim.premises]
    checked = [p.of(found) for p, found in zip(claim.premises, figures, strict=True)]
    return measured(claim, on, values, checked)


def _figure(premise: Premise, case: tuple[Facts, ...]) -> float | None:
    try:
        return premise.value(*case)
    except Missing:  # what cannot be measured is not known to be met
        return None
