"""What growing writes into run directories is what a report shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.helpers.growth import SETTINGS, mlp, teacher_data

from everydepth.growth import grow, scaling
from everydepth.growth.comparing import Arm, Comparison
from everydepth.reports import report
from everydepth.reports.cards import card
from everydepth.results import Results
from everydepth.runs.sweep import sweep


def drawn(found: Results) -> Results:
    """The same, once everything can be drawn or read."""
    for result in found.results.values():
        assert result.section == "growth"
        assert not any("could not be drawn" in note for note in card({"a": result}).notes)
    return found


def test_a_growth_is_shown_with_scores_rounds_search_and_certificate(tmp_path: Path) -> None:
    data = teacher_data(512, 0), teacher_data(400, 1), teacher_data(200, 2)
    grown = grow(mlp(), *data, **{**SETTINGS, "rounds": 1}, run=tmp_path / "run")
    assert grown.score is not None
    score = drawn(Results.load(tmp_path / "run" / "growth_score"))
    table = score.table("sites")
    assert table.column("verdict") == [site.verdict for site in grown.score.sites]
    assert np.allclose(score["z"], [s.z for s in grown.score.sites])
    history = drawn(Results.load(tmp_path / "run" / "growth"))
    rounds = history.table("rounds")
    kept = zip(
        rounds.column("choice by training loss"),
        rounds.column("choice by held-out loss"),
        strict=True,
    )
    assert list(kept) == [(r.paper, r.safe) for r in grown.rounds]
    search = history.result("search")
    assert len(search.x("round 1")) == len(grown.rounds[0].tried)
    assert len(history.result("scores").x("round 1")) == len(grown.score.sites)
    assert grown.held_out is not None
    outcome = history.table("held_out")
    assert outcome.column("verdict") == [verdict for _, _, verdict in grown.held_out.lines]
    page = report(tmp_path / "run", tmp_path / "page.html").read_text()
    assert all(
        message in page for message in ("Would a block help here?", "Growth by round", "Outcome on")
    )


def test_two_runs_stand_side_by_side_in_one_table() -> None:
    arms = tuple(
        Arm(name, seed, (0.0, 1.0, 2.0), (1.0, 0.5, loss))
        for seed in (0, 1)
        for name, loss in (("grown", 0.3), ("longer", 0.4), ("scratch", 0.9))
    )
    found = drawn(Comparison.of(arms, {"stacked": "no such block"}))
    both = card({"a": found.result("ways"), "b": found.result("ways")})
    assert both.table is not None
    assert [row[:2] for row in both.table.rows[:3]] == [
        ("a", way) for way in ("grown", "longer", "scratch")
    ]
    assert both.table.column("FLOP to equal loss")[:3] == [
        "1.00, 1.00",
        "1.00, 1.00",
        "never, never",
    ]
    shown = card({"a": found.result("held_out_loss"), "b": found.result("held_out_loss")})
    assert shown.notes == ("stacked: no such block",)
    assert len(shown.charts[0].marks) == 6


def test_sweeps_and_laws_are_drawn() -> None:
    found = sweep(
        {"layers": [8, 14], "width": [4, 8], "seed": [0, 1]},
        lambda layers, width, seed: {"test_loss": layers / width + seed, "signal": 1 / layers},
        progress=False,
    )
    assert len(drawn(found)) == 5  # two losses, two signals, and all cells
    assert found["test_loss_by_layers"].tolist() == [2.5, 4.0]
    assert len(found.table("cells").rows) == 8
    plan = scaling.plan(flops=1e21)
    law = drawn(scaling.as_results(scaling.EPOCH, plan, None))
    assert law.table("plan").rows[0][:2] == ("law: E", "1.817")
    assert law.result("plan").note is None
    points = {"parameters": [1e8, 1e9], "tokens": [1e10, 1e10], "loss": [3.0, 2.5]}
    fitted = drawn(scaling.as_results(scaling.EPOCH, plan, points))
    assert fitted.result("fit").x() == pytest.approx(scaling.EPOCH([1e8, 1e9], [1e10, 1e10]))
