"""Four verdicts, everywhere the same four."""

from __future__ import annotations

import doctest
import json
import math
from types import ModuleType

import pytest

from everydepth_papers import paper, verdict
from everydepth_papers.evidence.discover import load_recipe, recipe_files
from everydepth_papers.evidence.docs import recorded
from everydepth_papers.verdict import VERDICTS, of_all, of_interval

WORDS_FOR_A_VERDICT = {*VERDICTS, "held", "did not hold", "held in part", "undecided", "yes", "no"}


@pytest.mark.parametrize("module", [paper, verdict])
def test_the_examples_run(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed


def test_a_bound_that_is_reached_belongs_to_a_range_but_not_to_more_or_less() -> None:
    assert of_interval(0.0, 0.0, least=0.0) == "holds"
    assert of_interval(0.0, 0.0, least=0.0, strictly=True) == "does not hold"
    assert of_interval(-0.1, 0.1, least=-0.1, most=0.1) == "holds"
    assert of_interval(0.2, 0.3, least=-0.1, most=0.1) == "does not hold"


def test_without_an_interval_nothing_is_concluded() -> None:
    assert of_interval(math.nan, math.nan, least=0.0) == "inconclusive"
    assert of_all([]) == "not applicable"
    assert of_all(["holds", "inconclusive"]) == "inconclusive"
    assert of_all(["holds", "not applicable"]) == "holds"
    assert of_all(["not applicable"]) == "not applicable"


@pytest.mark.parametrize("name", recipe_files())
def test_recorded_statements_have_one_of_the_four(name: str) -> None:
    for found in recorded(recipe_files()[name].parent):
        words = {row.measured for row in found.rows if isinstance(row.measured, str)}
        assert words & WORDS_FOR_A_VERDICT <= set(VERDICTS)
        assert not any(word.startswith("held") for word in words)


def test_what_is_stored_names_papers_by_their_keys() -> None:
    for name, file in recipe_files().items():
        if not load_recipe(file).paper:
            continue
        for found in recorded(file.parent):
            assert name.startswith(tuple(paper.PAPERS))
            assert found.about["source"].startswith(tuple(p.name for p in paper.PAPERS.values()))
            assert "paper 00" not in json.dumps(dict(found.about))
