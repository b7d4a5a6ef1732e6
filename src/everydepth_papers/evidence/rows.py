"""What recipes share: choosing cells, and rows that say whether a statement holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from everydepth_papers.evidence.recipe import Finished, Row
from everydepth_papers.premise import FEWEST, Checked, Premise, counting, failing
from everydepth_papers.statistics import interval
from everydepth_papers.verdict import of_cases, of_interval


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
    premises: Sequence[Premise] = (),
) -> Row:
    """A row for a statement in words: in how many cases (seeds, pairs of seeds) it holds.

    quantity: begins with what of the paper it is about ("Fig. 2, 3: ..."), which the index reads.
    test: gets one case; the members of a pair are separate arguments. premises: a case counts only
    where they are met, and the row shows their figures. unit: fewer than three seeds decide
    nothing; other cases, such as published models, are all there are.
    """
    checked = [premise.checked(cases) for premise in premises]
    counted = counting(checked, len(cases))
    true = [
        bool(test(*case) if isinstance(case, tuple) else test(case))
        for case, yes in zip(cases, counted, strict=True)
        if yes
    ]
    count = f"{sum(true)} of {len(true)} {unit}" if true else f"none of {len(cases)} {unit} counts"
    if not cases:
        count = "no such cell in this preset"
    given = [f"given {one}" for one in checked if cases]
    words = "; ".join([count, *([note] if note and true else []), *given])
    verdict = failing(checked, len(cases)) or of_cases(true)
    if unit == "seeds" and 0 < len(true) < FEWEST:
        verdict = "inconclusive"
    return Row(quantity, published, verdict, note=words)


def holds_on_average(
    statement: str,
    published: str,
    values: Any,
    given: Sequence[Checked],
    *,
    low: float = -np.inf,
    high: float = np.inf,
) -> Row:
    """Whether the mean of a figure lies between low and high, judged by its 95 % interval.

    statement: begins with what of the paper it is about, as in `holds_in`. values: one per seed.
    given: the premises; seeds that do not meet them do not count.
    """
    found = np.asarray(values, dtype=float)
    words = [f"given {one}" for one in given]
    if refused := failing(given, len(found)):
        return Row(statement, published, refused, note="; ".join(words))
    found = found[np.array(counting(given, len(found)))]
    first, last = interval(found)
    both = np.isfinite([low, high]).all()  # a range has its ends, "smaller" and "larger" have not
    verdict = of_interval(first, last, least=low, most=high, strictly=not both)
    spread = (None, None) if np.isnan(first) else (short(first), short(last))
    mean = f"{found[np.isfinite(found)].mean():.3g}" if np.isfinite(found).any() else "no figure"
    alone = ["one seed has no interval"] if len(found) == 1 else []
    note = "; ".join([f"figure {mean}", *alone, *words])
    return Row(statement, published, verdict, *spread, note)


def short(value: float) -> float:
    return float(f"{value:.4g}")


def learned(baseline: str, words: str, least: float = 0.0) -> Premise:
    """Every network of a case predicts better, at its last depth, than what `baseline` names."""
    return Premise(
        test=f"accuracy of the last depth above {words}",
        value=lambda *case: min(r["accuracy"][-1] - r[baseline] for r in case),
        least=least,
        failing="inconclusive",
    )


def fits_surfaces(value: Callable[..., float | None]) -> Premise:
    """End-to-end training learned the surface. value: the share of a plane's error it takes off."""
    return Premise(
        test="share of a plane's error that end-to-end takes off",
        value=value,
        least=0.5,
        failing="inconclusive",
    )


def steps_of(result: Finished) -> str:
    """How many steps a network was tuned for, and in what; results of before do not say it."""
    steps = f"{result.cell['marks'][-1]} steps"
    return f"{steps}, {result['precision']}" if "precision" in result.values else steps
