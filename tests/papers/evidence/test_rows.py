"""Rows that say whether a statement holds."""

from __future__ import annotations

import copy

import numpy as np

from everydepth_papers.evidence import Finished, Recipe, Row, find_recipe
from everydepth_papers.evidence.docs import recorded
from everydepth_papers.evidence.rows import holds_in, learned, numbers, paired, where
from everydepth_papers.evidence.summaries import EDGE, distance
from everydepth_papers.verdict import VERDICTS


def result(seed: int, value: float, **cell: object) -> Finished:
    return Finished(cell=dict(cell), seed=seed, values={"value": value}, seconds=0.0)


RESULTS = [
    result(0, 1.0, objective="standard"),
    result(1, 2.0, objective="standard"),
    result(1, 3.0, objective="aligned"),
    result(0, 0.5, objective="aligned"),
]


def test_cells_are_chosen_by_their_settings() -> None:
    assert [r["value"] for r in where(RESULTS, objective="aligned")] == [3.0, 0.5]
    assert where(RESULTS, objective="standard", depth=3) == []


def test_pairs_have_the_same_seed_and_leave_out_seeds_without_a_partner() -> None:
    aligned, standard = (where(RESULTS, objective=name) for name in ("aligned", "standard"))
    pairs = paired(aligned, [*standard, result(7, 9.0)])
    assert [(a["value"], s["value"]) for a, s in pairs] == [(3.0, 2.0), (0.5, 1.0)]


def test_a_statement_holds_in_all_some_or_no_seeds() -> None:
    pairs = paired(where(RESULTS, objective="aligned"), where(RESULTS, objective="standard"))

    def verdict(threshold: float, unit: str = "models") -> tuple[object, str]:
        def larger(a: Finished, s: Finished) -> bool:
            return a["value"] > s["value"] + threshold

        row = holds_in("q", "p", pairs, larger, "why", unit=unit)
        return row.measured, row.note

    assert verdict(-9) == ("holds", "2 of 2 models; why")
    assert verdict(0) == ("inconclusive", "1 of 2 models; why")
    assert verdict(9) == ("does not hold", "0 of 2 models; why")
    assert verdict(-9, "seeds") == ("inconclusive", "2 of 2 seeds; why")


def test_two_seeds_decide_nothing_and_three_do() -> None:
    three = [result(seed, 1.0) for seed in range(3)]
    assert holds_in("q", "p", three, lambda r: True).measured == "holds"
    assert holds_in("q", "p", three[:2], lambda r: True).measured == "inconclusive"


def recorded_of(name: str) -> tuple[Recipe, list[Finished]]:
    """A recipe, and copies of its recorded cells."""
    recipe, folder = find_recipe(name)
    return recipe, copy.deepcopy(list(recorded(folder)[0].finished))


def test_errors_of_two_objectives_are_judged_by_the_interval_of_their_ratio() -> None:
    recipe, cells = recorded_of("progressive_table1")
    cells = [one for one in cells if one.cell["batch_size"] < one.cell["points"]][:5]

    def verdict(*ratios: float) -> object:
        for one, ratio in zip(cells, ratios, strict=True):
            by = one["networks"]["standing_wave_grid"]
            by["lpa"]["mse"][-1] = ratio * by["end_to_end"]["mse"][-1]
        said = [
            row for row in recipe.rows(cells) if "standing wave grid, LPA's MSE" in row.quantity
        ]
        return said[0].measured

    # One seed of five where end-to-end is a little better does not make it undecided.
    assert verdict(0.5, 0.6, 0.55, 0.5, 1.01) == "holds"
    assert verdict(0.5, 2.0, 0.5, 2.0, 1.0) == "inconclusive"
    assert verdict(1.5, 1.6, 1.55, 1.5, 0.99) == "does not hold"


def test_theorem_2_is_about_networks_whose_features_collapse() -> None:
    recipe, cells = recorded_of("tracing_vision")

    def theorem() -> Row:
        said = [r for r in recipe.rows(cells) if r.quantity.startswith("Theorem 2: the label")]
        return next(r for r in said if r.measured in VERDICTS)

    for one in cells:
        one["train_accuracy"][-1] = 0.98
    assert theorem().measured == "not applicable"
    for one in cells:
        one["train_accuracy"][-1] = 0.995
    assert theorem().measured in ("holds", "does not hold", "inconclusive")
    assert "needed >= 0.99" in theorem().note


def test_a_statement_without_cases_is_not_judged() -> None:
    row = holds_in("q", "p", [], lambda r: True, "why")
    assert row.measured == "not applicable"
    assert row.note == "no such cell in this preset"


def test_undefined_values_become_null_and_are_never_nan() -> None:
    masked = np.ma.masked_array([0.123456789, 0.0], mask=[False, True])
    assert numbers(masked) == [0.12346, None]
    assert numbers(np.eye(2)) == [[1.0, 0.0], [0.0, 1.0]]


def test_a_premise_that_was_not_measured_is_not_met() -> None:
    learned_ = learned("linear", "a linear classifier's")
    row = holds_in("q", "p", RESULTS[:2], lambda r: True, premises=[learned_])
    assert row.measured == "inconclusive"
    assert "undefined, needed >= 0: 0 of 2" in row.note


def test_a_claim_far_from_its_threshold_is_drawn_at_the_edge() -> None:
    claim = {"relation": ">=", "threshold": 0.0}
    assert distance(claim, {"mean": None, "low": None, "high": None}) is None
    assert distance(claim, {"mean": -5.0, "low": -5.1, "high": -4.9}) == (-EDGE, 1.0)
    assert distance(claim, {"mean": 0.1, "low": -0.1, "high": 0.3}) == (0.5, 1.0)
    assert distance(claim, {"mean": 1.0, "low": 1.0, "high": 1.0}) == (EDGE, 0.0)
    assert distance(claim, {"mean": 0.0, "low": 0.0, "high": 0.0}) == (0.0, 0.0)
