"""What recipes share: choosing cells, and rows that say whether a statement holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from everydepth_papers.evidence.recipe import Finished, Row
from everydepth_papers.verdict import of_cases


def where(results: Sequence[Finished], **settings: Any) -> list[Finished]:
    """The results whose cells have these settings."""
    return [r for r in results if all(r.cell.get(k) == v for k, v in settings.items())]


def paired(
    first: Sequence[Finished], second: Sequence[Finished]
) -> list[tuple[Finished, Finished]]:
    """Results of the same seed, side by side."""
    by_seed = {result.seed: result for result in second}
    return [(result, by_seed[result.seed]) for result in first if result.seed in by_seed]


def numbers(values: Any, digits: int = 5) -> Any:
    """An array as JSON: rounded lists, None where a value is masked."""
    rounded = np.ma.round(np.ma.asarray(values, dtype=float), digits)
    return rounded.tolist()


def holds_in(
    quantity: str,
    published: str,
    cases: Sequence[Any],
    test: Callable[..., bool],
    note: str = "",
    *,
    unit: str = "seeds",
) -> Row:
    """A row for a statement in words: in how many cases (seeds, pairs of seeds) it holds.

    test: gets one case; the members of a pair are separate arguments.
    """
    true = [bool(test(*case) if isinstance(case, tuple) else test(case)) for case in cases]
    count = f"{sum(true)} of {len(true)} {unit}" if true else "no such cell in this preset"
    words = f"{count}; {note}" if note and true else count
    return Row(quantity, published, of_cases(true), note=words)
