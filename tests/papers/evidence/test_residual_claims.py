"""Verdicts on the claims of Residual Relay, and the rows that carry them."""

from __future__ import annotations

from typing import Any

import pytest

from everydepth_papers.evidence import Finished
from everydepth_papers.evidence.recipe import Row
from everydepth_papers.evidence.residual_claims import (
    FITTED,
    claim,
    mean_row,
    removal_rows,
    scale_rows,
)


def judged(values: list[float], fitted: list[float | None] | None = None, **bounds: float) -> Row:
    return claim("x", "early", values, [] if fitted is None else [FITTED.of(fitted)], **bounds)


def test_a_claim_holds_only_where_its_whole_interval_does() -> None:
    assert judged([0.5, 0.51, 0.52], low=0.0).measured == "holds"
    assert judged([-0.5, -0.51, -0.52], low=0.0).measured == "does not hold"
    assert judged([-0.5, 0.1, 0.5], low=0.0).measured == "inconclusive"
    assert judged([0.01, -0.01, 0.0], low=-0.05, high=0.05).measured == "holds"
    alone = judged([0.5], low=0.0)
    assert (alone.measured, alone.note) == ("inconclusive", "figure 0.5; one seed has no interval")


def test_seeds_that_did_not_fit_their_labels_say_nothing_of_memorization() -> None:
    some = judged([0.5, 0.51, 0.52, -9.0], [1.0, 0.995, 1.0, 0.8], low=0.0)
    assert some.measured == "holds"
    assert "wrong labels included 0.949 (0.8 to 1), needed >= 0.99: 3 of 4" in some.note
    two = judged([0.5, 0.5, -9.0], [1.0, 1.0, 0.8], low=0.0)
    assert two.measured == "not applicable"
    none = judged([0.5, 0.51, 0.52], [0.8, None, 1.0], low=0.0)
    assert none.measured == "not applicable"


def test_a_claim_carries_the_interval_that_decided_it() -> None:
    row = judged([1.0, 2.0, 3.0], low=0.0)
    half = 4.302653 / 3**0.5
    assert (row.low, row.high) == pytest.approx((2 - half, 2 + half), rel=1e-3)
    assert row.note == "figure 2"


def test_a_mean_of_one_seed_has_no_interval() -> None:
    row = mean_row("x", 100.0, [0.25], scale=100.0)
    assert (row.measured, row.low, row.high, row.note) == (25.0, None, None, "1 seed")


def results(
    memorized: list[list[float]], accuracy: list[list[float]], majority: float = 0.05
) -> list[Finished]:
    """Seeds down; across: layer 1, layer 2, then the untouched network."""

    def values(seed: int, mem: list[float], acc: list[float]) -> dict[str, Any]:
        runs = {"memorization": mem, "accuracy": acc, "reached": [float(m == 1) for m in mem]}
        arms = (("layer-01-c-0", 9), ("layer-02-c-0", 30), ("untouched", 7))
        return {
            "majority": majority,
            "removed": {
                "layers": [1, 2],
                "c": [0.0, 1.0],
                "runs": {k: [[[v[0], v[2]], [v[1], v[2]]]] for k, v in runs.items()},
                "untouched": {k: [v[2]] for k, v in runs.items()},
            },
            "epochs": {
                f"{name}-seed-{seed}": {"epochs": epochs, "reached": share == 1}
                for (name, epochs), share in zip(arms, mem, strict=True)
            },
        }

    return [
        Finished(cell={}, seed=i, values=values(i, m, a), seconds=0.0)
        for i, (m, a) in enumerate(zip(memorized, accuracy, strict=True))
    ]


def test_removal_is_compared_with_the_untouched_network_of_the_same_seed() -> None:
    found = results(
        memorized=[[1.0, 0.2, 1.0], [1.0, 0.3, 1.0], [1.0, 0.25, 1.0]],
        accuracy=[[0.3, 0.8, 0.81], [0.35, 0.85, 0.86], [0.4, 0.9, 0.91]],
    )
    rows = by_quantity(removal_rows(found, "Fig. 1"))
    assert rows["memorization %, layer 1 without"].measured == 100
    assert rows["memorization %, layer 2 without"].measured == 25
    assert "0 of 3 runs" in rows["memorization %, layer 2 without"].note
    assert rows["epochs of training, layer 2 without"].measured == 30
    same = "removing the skips of layer {} leaves memorization as it is (within 5 points)"
    assert rows[same.format(1)].measured == "holds"
    # Seeds differ by more than the drop, which is the same in each.
    assert rows["removing the skips of layer 1 lowers test accuracy"].measured == "holds"


def by_quantity(rows: list[Row]) -> dict[str, Row]:
    return {row.quantity.removeprefix("Fig. 1: "): row for row in rows}


def test_what_a_network_without_skips_did_not_memorize_counts_against_the_claim() -> None:
    """That it fitted is a premise of comparing test accuracies, not of comparing memorization."""
    found = results(
        memorized=[[1.0, 0.2, 1.0], [1.0, 0.3, 1.0], [1.0, 0.25, 1.0]],
        accuracy=[[0.3, 0.8, 0.81], [0.35, 0.85, 0.86], [0.4, 0.9, 0.91]],
    )
    rows = by_quantity(removal_rows(found, "Fig. 1"))
    same = "removing the skips of layer 2 leaves memorization as it is (within 5 points)"
    assert rows[same].measured == "does not hold"
    assert rows["removing the skips of layer 2 lowers test accuracy"].measured == "not applicable"


def test_networks_that_know_nothing_have_no_accuracy_to_lose() -> None:
    found = results(
        memorized=[[1.0, 1.0, 1.0]] * 3,
        accuracy=[[0.3, 0.3, 0.31], [0.3, 0.3, 0.33], [0.3, 0.3, 0.29]],
        majority=0.31,
    )
    rows = by_quantity(removal_rows(found, "Fig. 1"))
    lowered = rows["removing the skips of layer 1 lowers test accuracy"]
    assert lowered.measured == "inconclusive"
    assert "test accuracy above the most frequent answer 0 (-0.02 to 0.02)" in lowered.note


def test_scaling_is_ranked_by_the_factor_with_removal_and_the_untouched_network() -> None:
    scaled = {
        "c": [0.25, 0.5, 0.75],
        "runs": {"memorization": [[[1.0, 1.0, 1.0]]], "accuracy": [[[0.2, 0.4, 0.6]]]},
    }
    plain = results([[1.0, 1.0, 1.0]] * 3, [[0.1, 0.8, 0.8]] * 3)
    found = [
        Finished(cell={}, seed=r.seed, values={**r.values, "scaled": scaled}, seconds=0.0)
        for r in plain
    ]
    rows = scale_rows(found)
    assert [row.measured for row in rows[3:6]] == [20.0, 40.0, 60.0]
    assert rows[-1].measured == "holds"
    assert rows[-1].note.startswith("figure 1; given test accuracy above the most frequent answer")
    last = results([[1.0, 1.0, 1.0]] * 3, [[0.9, 0.8, 0.1]] * 3)
    other = [
        Finished(cell={}, seed=r.seed, values={**r.values, "scaled": scaled}, seconds=0.0)
        for r in last
    ]
    assert scale_rows(other)[-1].measured == "does not hold"
