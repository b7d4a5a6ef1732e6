"""Verdicts on the claims of Residual Relay, and the rows that carry them."""

from __future__ import annotations

from typing import Any

import pytest

from everydepth_papers.evidence import Finished
from everydepth_papers.evidence.residual_claims import claim, mean_row, removal_rows, scale_rows


def test_a_claim_holds_only_where_its_whole_interval_does() -> None:
    assert claim("x", [0.5, 0.51, 0.52], low=0.0).measured == "holds"
    assert claim("x", [-0.5, -0.51, -0.52], low=0.0).measured == "does not hold"
    assert claim("x", [-0.5, 0.1, 0.5], low=0.0).measured == "inconclusive"
    assert claim("x", [0.01, -0.01, 0.0], low=-0.05, high=0.05).measured == "holds"
    alone = claim("x", [0.5], low=0.0)
    assert (alone.measured, alone.note) == ("inconclusive", "figure 0.5; one seed has no interval")


def test_seeds_that_did_not_fit_their_labels_say_nothing_of_memorization() -> None:
    some = claim("x", [0.5, 0.51, 0.52, -9.0], [1.0, 0.995, 1.0, 0.8], low=0.0)
    assert some.measured == "holds"
    assert "wrong labels included 0.949 (0.8 to 1), needed >= 0.99: 3 of 4" in some.note
    two = claim("x", [0.5, 0.5, -9.0], [1.0, 1.0, 0.8], low=0.0)
    assert two.measured == "not applicable"
    none = claim("x", [0.5, 0.51, 0.52], [0.8, None, 1.0], low=0.0)
    assert none.measured == "not applicable"


def test_a_claim_carries_the_interval_that_decided_it() -> None:
    row = claim("x", [1.0, 2.0, 3.0], low=0.0)
    half = 4.302653 / 3**0.5
    assert (row.low, row.high) == pytest.approx((2 - half, 2 + half), rel=1e-3)
    assert row.note == "figure 2"


def test_a_mean_of_one_seed_has_no_interval() -> None:
    row = mean_row("x", 100.0, [0.25], scale=100.0)
    assert (row.measured, row.low, row.high, row.note) == (25.0, None, None, "1 seed")


def results(memorized: list[list[float]], accuracy: list[list[float]]) -> list[Finished]:
    """Seeds down; across: layer 1, layer 2, then the untouched network."""

    def values(seed: int, mem: list[float], acc: list[float]) -> dict[str, Any]:
        runs = {"memorization": mem, "accuracy": acc, "reached": [float(m == 1) for m in mem]}
        return {
            "removed": {
                "layers": [1, 2],
                "c": [0.0, 1.0],
                "runs": {k: [[[v[0], v[2]], [v[1], v[2]]]] for k, v in runs.items()},
                "untouched": {k: [v[2]] for k, v in runs.items()},
            },
            "epochs": {
                f"{name}-seed-{seed}": {"epochs": epochs, "reached": True}
                for name, epochs in (("untouched", 7), ("layer-01-c-0", 9), ("layer-02-c-0", 30))
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
    rows = {row.quantity: row for row in removal_rows(found)}
    assert rows["memorization %, layer 1 without"].measured == 100
    assert rows["memorization %, layer 2 without"].measured == 25
    assert "0 of 3 runs" in rows["memorization %, layer 2 without"].note
    assert rows["epochs of training, layer 2 without"].measured == 30
    verdicts = {q.removeprefix("claim: "): r.measured for q, r in rows.items() if "claim" in q}
    same = "removing the skips of layer {} leaves memorization as it is (within 5 points)"
    assert verdicts[same.format(1)] == "holds"
    assert verdicts[same.format(2)] == "does not hold"
    # Seeds differ by more than the drop, which is the same in each.
    assert verdicts["removing the skips of layer 2 lowers test accuracy"] == "holds"
    assert verdicts["test accuracy falls more without layer 1 than without 2"] == "holds"


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
    assert rows[-1].note.startswith("figure 1; given training accuracy")
    last = results([[1.0, 1.0, 1.0]] * 3, [[0.9, 0.8, 0.1]] * 3)
    other = [
        Finished(cell={}, seed=r.seed, values={**r.values, "scaled": scaled}, seconds=0.0)
        for r in last
    ]
    assert scale_rows(other)[-1].measured == "does not hold"
