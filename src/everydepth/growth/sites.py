"""The sites where a block could go, and how clear the signal for one is at each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from everydepth.config import checked
from everydepth.errors import SettingError
from everydepth.growth.candidates import Candidate, Direction
from everydepth.results import Fact, Result, Results, Table, curve, named, provenance, rows
from everydepth.results.results import restored

DEEPEN, NO, UNSURE = "deepen here", "no", "not enough data"
SITE = "a new block after depth"


@dataclass(frozen=True)
class Alignment:
    """Whether the mean gradients of training and test data point the same way.

    cosine: between the two. bound: on the probability that their inner product is not positive; 1
    if the bound is vacuous. rows: number of test rows.
    """

    cosine: float
    bound: float
    rows: int


@dataclass(frozen=True)
class Covariance:
    """The covariance of per-row gradients at a site.

    trace, top: `tr Sigma` and `||Sigma||_2`. matrix: the block at `coordinates`, a random subset,
    divided by the mean variance. within_1, within_10: the share of its off-diagonal entries that
    are at most 1 % and 10 % of the mean variance.
    """

    trace: float
    top: float
    within_1: float
    within_10: float
    coordinates: tuple[int, ...] = field(repr=False)
    matrix: tuple[tuple[float, ...], ...] = field(repr=False)


@dataclass(frozen=True)
class SiteScore:
    """One site: a new block would go right after depth `after`.

    norm: `||G||_F` (Condition 1) over the weights and biases of every branch's last map.
    gain: an unbiased estimate of `||E G||^2`, the first-order decrease per unit step. low, high:
        its 95 % bootstrap interval.
    z: `gain` divided by its standard error under no signal. p: how often the best of all sites
        would score this high under no signal.
    signal: `||gbar||`, the gradient summed over tokens or positions.
    needed: rows needed to detect a signal of this size with 90 % power; None if there is none.
    """

    after: int
    norm: float
    gain: float
    low: float
    high: float
    z: float
    p: float
    signal: float
    verdict: str
    needed: int | None
    alignment: Alignment | None
    covariance: Covariance


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Score(Results, kind="growth_score"):
    """The score of every site; `score["z"]` is an array over sites.

    candidates, directions: the candidate blocks and their gradients; empty after loading.
    """

    candidates: Mapping[int, Candidate] = field(default_factory=dict[int, Candidate])
    directions: Mapping[int, list[Direction]] = field(default_factory=dict[int, list[Direction]])
    loss = Fact(float)
    """The mean loss over all rows."""
    verdict = Fact(str)
    """The recommendation, in one sentence."""

    @classmethod
    def of(
        cls,
        sites: Sequence[SiteScore],
        candidates: Mapping[int, Candidate],
        directions: Mapping[int, list[Direction]],
        **facts: Any,
    ) -> Score:
        """facts: those of `provenance`, and the loss."""
        return cls(
            results=named(*_measurements(sites, facts["samples"])),
            about=provenance(verdict=_verdict(sites), sites=sites, **facts),
            candidates=candidates,
            directions=directions,
        )

    @cached_property
    def sites(self) -> tuple[SiteScore, ...]:
        """Every site, the shallowest first."""
        return restored(tuple[SiteScore, ...], self.about["sites"])

    @checked
    def at(self, after: int) -> SiteScore:
        """The site right after depth `after`."""
        for site in self.sites:
            if site.after == after:
                return site
        raise SettingError(
            f"after={after} was not scored; use one of {[site.after for site in self.sites]}"
        )

    @property
    def best(self) -> SiteScore:
        """The site with the clearest signal."""
        return max(self.sites, key=lambda site: site.z)

    @property
    def ranked(self) -> tuple[SiteScore, ...]:
        """The sites worth deepening, the clearest first."""
        good = [site for site in self.sites if site.verdict == DEEPEN]
        return tuple(sorted(good, key=lambda site: -site.z))

    def table(self, name: str | None = None) -> Table:
        """Every site, or the table of one measurement."""
        return super().table("sites" if name is None else name)

    def __str__(self) -> str:
        return f"{self.model}: {self.verdict} ({self.samples:,} rows, loss {self.loss:.4g})"


def _verdict(sites: Sequence[SiteScore]) -> str:
    good = [site for site in sites if site.verdict == DEEPEN]
    if good:
        return f"{DEEPEN}: after {max(good, key=lambda site: site.z).after}"
    needed = [site.needed for site in sites if site.verdict == UNSURE and site.needed is not None]
    if needed:
        return f"{UNSURE}: about {min(needed):,} rows would settle it"
    return "deepest model: no site has a first-order signal"


def _measurements(sites: Sequence[SiteScore], samples: int) -> list[Result]:
    def column(name: str) -> list[Any]:
        return [getattr(site, name) for site in sites]

    words: dict[str, Any] = {"section": "growth"}
    band = {name: column(name) for name in ("low", "high")}
    best = max(sites, key=lambda site: site.z)
    matrix = np.array(best.covariance.matrix, dtype=float)
    return [
        curve(
            "z",
            column("after"),
            column("z"),
            kind="bars",
            labels={"depth": SITE, "value": "z of the gradient"},
            title="Would a block help here?",
            about="Gradient of a new block's last projection at every site, relative to its noise.",
            note=f"{_verdict(sites)} ({samples:,} rows)",
            better="higher",
            **words,
        ),
        curve(
            "gain",
            column("after"),
            column("gain"),
            **band,
            labels={"depth": SITE, "value": "gain per unit step"},
            title="First-order gain",
            about="Decrease in loss per unit step, with a 95 % interval.",
            better="higher",
            **words,
        ),
        rows(
            "sites",
            {
                "after": column("after"),
                "|G|": column("norm"),
                "gain": column("gain"),
                **band,
                "z": column("z"),
                "p": column("p"),
                "|gbar|": column("signal"),
                "train · test": [a and a.cosine for a in column("alignment")],
                "verdict": column("verdict"),
                "rows needed": column("needed"),
            },
            title="Sites",
            about="p accounts for all sites; low and high are the 95 % interval of the gain.",
            **words,
        ),
        Result(
            name="covariance",
            kind="matrix",
            axis="coordinate",
            series=("value",),
            arrays={"coordinate": np.arange(len(matrix)), "value": matrix},
            labels={"coordinate": "coordinate (random subset)", "value": "share of mean variance"},
            title=f"Covariance of the gradients after depth {best.after}",
            **words,
        ),
    ]
