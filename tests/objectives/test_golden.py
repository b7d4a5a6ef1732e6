"""What every objective of everydepth 0.1 weighed and drew, recorded then, bit for bit.

`golden.json` has one line a case: the call that makes the objective (with today's names), what a
run directory holds of it ("saved"), and its numbers, by "step/depth" of 100 steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from everydepth import objectives
from everydepth.objectives import CosineDistance, LayerDropout, Objective

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden.json").read_text())
NAMES = {name: getattr(objectives, name) for name in objectives.__all__}
IDS = [case["call"] or f"saved-{number}" for number, case in enumerate(CASES)]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_weights_and_draws_are_those_of_the_first_release(case: dict[str, Any]) -> None:
    objective = Objective.from_json(case["saved"])
    assert objective.needs_total == case["needs_total"]
    for where, expected in case["weights"].items():
        step, depth = map(int, where.split("/"))
        assert objective.weights(step, 100, depth).tolist() == expected, where
        certain = case.get("expected", {}).get(where, expected)
        assert objective.expected_weights(step, 100, depth).tolist() == certain, where
    for depth, steps in case["cycle"].items():
        assert objective.cycle(int(depth)) == steps
    for depth, expected in case.get("cosine", {}).items():
        term = objective.get(CosineDistance)
        assert term is not None
        assert (term.beta * term.shape.weights(int(depth))).tolist() == expected
    # Where the chance rises, 0.1 divided by the number of steps: these were recorded with 99.
    for where, expected in case.get("kept", {}).items():
        step, depth, stream = map(int, where.split("/"))
        dropout = objective.get(LayerDropout)
        assert dropout is not None
        kept = dropout.kept(objective.moment(step, 100, depth), 5, stream=stream)
        assert ["".join(map(str, row)) for row in kept.int().tolist()] == expected, where


@pytest.mark.parametrize("case", [case for case in CASES if case["call"]], ids=lambda c: c["call"])
def test_a_saved_objective_is_what_the_same_call_makes(
    case: dict[str, Any],
) -> None:
    made = eval(case["call"], NAMES)  # our own file
    assert Objective.from_json(case["saved"]) == made
    assert Objective.from_json(json.loads(json.dumps(made.to_json()))) == made
