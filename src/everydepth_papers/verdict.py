"""The four verdicts, and what gives one: an interval, cases, or other verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, get_args

Verdict = Literal["holds", "does not hold", "inconclusive", "not applicable"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


def of_interval(
    low: float,
    high: float,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    strictly: bool = False,
) -> Verdict:
    """Whether a figure lies from `least` to `most`, of which only the interval is known.

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


def of_all(verdicts: Iterable[Verdict]) -> Verdict:
    """Holds if it holds everywhere; does not, if it does not somewhere; else inconclusive.

    >>> from everydepth_papers.verdict import of_all
    >>> of_all(["holds", "does not hold", "inconclusive"])
    'does not hold'
    """
    found = set(verdicts)
    if not found:
        return "not applicable"
    if found == {"holds"}:
        return "holds"
    return "does not hold" if "does not hold" in found else "inconclusive"
