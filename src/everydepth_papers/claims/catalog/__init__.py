"""The claims, paper by paper: each a statement, a number, and the threshold that decides it.

Thresholds were set before anything was measured, from what the papers print or say. Words such as
"matches" and "negligible" became numbers by our choice: one point of accuracy, 2 % of a perplexity,
10 % of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType

from everydepth.errors import SettingError
from everydepth_papers.claims.catalog import expansion, one_layer, progressive, residual, tracing
from everydepth_papers.claims.claim import Claim

_PAPERS = (progressive, expansion, tracing, one_layer, residual)

CLAIMS: Mapping[str, Claim] = MappingProxyType(
    {claim.name: claim for paper in _PAPERS for claim in paper.CLAIMS}
)
"""All claims by name, in the order of the papers."""


def checked_names(names: Iterable[str]) -> list[str]:
    """The names, if all are claims."""
    found = list(names)
    for name in found:
        if name not in CLAIMS:
            close = get_close_matches(name, CLAIMS, 1, cutoff=0.3)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise SettingError(
                f"claim {name!r} is not in the ledger; {hint}`everydepth claims --list` shows all "
                f"{len(CLAIMS)}"
            )
    return found
