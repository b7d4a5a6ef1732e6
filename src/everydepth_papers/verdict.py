"""The four verdicts, and what gives one: an interval, cases, or other verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Literal, get_args

from everydepth.config import Setting, checked
from everydepth.errors import SettingError

Verdict = Literal["holds", "does not hold", "inconclusive", "not applicable"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


_Unsure = Annotated[float, Setting(finite=False)]


@checked
def of_interval(
    low: _Unsure,
    high: _Unsure,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    strictly: bool = False,
) -> Verdict:
    """Whether a figure lies between `least` and `most`, judged by its interval.

    It holds where the whole interval is there, does not hold where none of it is, and is
    inconclusive in between or without an interval. strictly: `least` and `most` are not there.

    >>> from everydepth_papers.verdict import of_interval
    >>> of_interval(0.1, 0.2, least=0.0), of_interval(-0.1, 0.2, least=0.0)
    ('holds', 'inconclusive')
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        return "inconclusive"
    if strictly:
        inside, outside = least < low and high < most, high <= least or low >= most
    else:
        inside, outside = least <= low and high <= most, high < least or low > most
    return "holds" if inside else "does not hold" if outside else "inconclusive"


@checked
def of_worst(
    values: Iterable[float], *, least: float = -math.inf, most: float = math.inf
) -> Verdict:
    """Whether every figure lies from `least` to `most`: what a theorem or "all layers" claims.

    One counterexample refutes it; one case alone does not establish it.

    >>> from everydepth_papers.verdict import of_worst
    >>> of_worst([0.1, 0.9], most=1.0), of_worst([0.1, 1.1], most=1.0), of_worst([0.1], most=1.0)
    ('holds', 'does not hold', 'inconclusive')
    """
    found = list(values)
    if not all(least <= value <= most for value in found):
        return "does not hold"
    return "holds" if len(found) > 1 else "inconclusive"


@checked
def of_cases(cases: Iterable[bool]) -> Verdict:
    """Whether a statement is true in every case; inconclusive where it is in some.

    >>> from everydepth_papers.verdict import of_cases
    >>> of_cases([True, True]), of_cases([True, False]), of_cases([])
    ('holds', 'inconclusive', 'not applicable')
    """
    found = set(cases)
    if not found:
        return "not applicable"
    return "inconclusive" if len(found) == 2 else "holds" if True in found else "does not hold"


@checked
def of_all(verdicts: Iterable[Verdict]) -> Verdict:
    """Holds if it holds everywhere; does not, if it does not somewhere; else inconclusive.

    Where it is not applicable it says nothing, unless that is everywhere.

    >>> from everydepth_papers.verdict import of_all
    >>> of_all(["holds", "does not hold", "inconclusive"]), of_all(["holds", "not applicable"])
    ('does not hold', 'holds')
    """
    found = set(verdicts) - {"not applicable"}
    if not found:
        return "not applicable"
    if found == {"holds"}:
        return "holds"
    return "does not hold" if "does not hold" in found else "inconclusive"


ENOUGH = 3
"""Seeds below which an interval is of no use."""


MOST = 10_000
"""Seeds of one command: the list of what there is to do has to fit into the memory."""


def check_seeds(seeds: int) -> int:
    if not 1 <= seeds <= MOST:
        raise SettingError(f"{seeds} seeds; use 1 or more, at most {MOST:,}")
    return seeds


def few_seeds(seeds: int) -> str:
    """What a ledger of too few seeds is worth; empty if there are enough.

    >>> from everydepth_papers.verdict import few_seeds
    >>> few_seeds(10), few_seeds(1)[:18]
    ('', '**1 seed(s) so far')
    """
    if seeds >= ENOUGH:
        return ""
    return (
        f"**{seeds} seed(s) so far, which decide next to nothing**: a mean has no interval that is "
        "of use, so only a counterexample to a claim about every case is a verdict. The command "
        "that goes on is `everydepth claims --seeds 10`."
    )
