"""Premises: what must be true of a case before a statement about it is judged at all.

A network that never learned, or labels that were never memorized, say nothing about learning or
memorization. Claims and recipes share this file: a case whose premise fails does not count, and
where too few count, the premise gives the verdict and shows its figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from everydepth_papers.number import number
from everydepth_papers.verdict import Verdict

FEWEST = 3
"""Cases that must count, and at least half of them: an interval of two values decides nothing."""


@dataclass(frozen=True, kw_only=True)
class Premise:
    """A figure of a case, and the least it must be.

    value: gets the case; the members of a tuple are separate arguments. A KeyError says that the
        figure was not measured, so that the premise is not known to be met.
    failing: the verdict on a statement whose premise fails.

    >>> from everydepth_papers.premise import Premise
    >>> fitted = Premise(test="training accuracy", value=lambda case: case["train"], least=0.99)
    >>> str(fitted.checked([{"train": 1.0}, {"train": 0.8}]))
    'training accuracy 0.9 (0.8 to 1), needed >= 0.99: 1 of 2'
    """

    test: str
    value: Callable[..., float | None]
    least: float = 0.0
    failing: Verdict = "not applicable"

    def checked(self, cases: Sequence[Any]) -> Checked:
        """The premise checked in every case."""
        return self.of([self._figure(c if isinstance(c, tuple) else (c,)) for c in cases])

    def _figure(self, case: tuple[Any, ...]) -> float | None:
        try:
            return self.value(*case)
        except KeyError:
            return None

    def of(self, figures: Sequence[float | None]) -> Checked:
        """The same from known figures; None where one is unknown."""
        return Checked(
            test=self.test,
            least=self.least,
            failing=self.failing,
            figures=tuple(math.nan if one is None else float(one) for one in figures),
        )


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A premise and its figure in every case."""

    test: str
    least: float
    failing: Verdict
    figures: tuple[float, ...]

    @property
    def met(self) -> tuple[bool, ...]:
        return tuple(figure >= self.least for figure in self.figures)  # NaN is not

    def to_json(self) -> dict[str, Any]:
        """The inverse of `of_json`; NaN becomes null."""
        figures = [None if np.isnan(figure) else figure for figure in self.figures]
        return {**asdict(self), "figures": figures}

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Checked:
        kept: dict[str, Any] = dict(content)
        kept["figures"] = tuple(math.nan if one is None else one for one in content["figures"])
        return cls(**kept)

    def __str__(self) -> str:
        known = [figure for figure in self.figures if not np.isnan(figure)]
        shown = "undefined"
        if known:
            mean, low, high = float(np.mean(known)), min(known), max(known)
            shown = f"{number(mean)} ({number(low)} to {number(high)})"
        return f"{self.test} {shown}, needed >= {self.least:g}: {sum(self.met)} of {len(self.met)}"


def counting(checked: Sequence[Checked], cases: int) -> tuple[bool, ...]:
    """Which cases count: those that meet every premise."""
    return tuple(all(one.met[place] for one in checked) for place in range(cases))


def failing(checked: Sequence[Checked], cases: int) -> Verdict | None:
    """The verdict where too few cases count, by the premise that fails most; else None.

    >>> from everydepth_papers.premise import Premise, failing
    >>> fitted = Premise(test="training accuracy", value=lambda accuracy: accuracy, least=0.99)
    >>> failing([fitted.checked([0.8, 0.7, 1.0])], 3), failing([fitted.checked([1.0, 1.0])], 2)
    ('not applicable', None)
    """
    enough = max(min(FEWEST, cases), cases / 2)
    if not checked or sum(counting(checked, cases)) >= enough:
        return None
    return min(checked, key=lambda one: sum(one.met)).failing
