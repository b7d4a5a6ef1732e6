"""Panels of growth: what a run directory holds is what the page shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tests.helpers.growth import SETTINGS, mlp, teacher_data

from everydepth.growth import grow, scaling
from everydepth.growth.comparing import Arm, Comparison
from everydepth.report import report
from everydepth.report.panels import SECTIONS, draw
from everydepth.runs import Run
from everydepth.runs.sweep import sweep

NAMES = ("growth_score", "growth", "growth_certificate")


def plain(content: Any) -> Any:
    return json.loads(json.dumps(content))


def test_a_growth_is_shown_with_scores_rounds_search_and_certificate(tmp_path: Path) -> None:
    data = teacher_data(512, 0), teacher_data(400, 1), teacher_data(200, 2)
    grown = grow(mlp(), *data, **{**SETTINGS, "rounds": 1}, run=tmp_path / "run")
    results = Run.open(tmp_path / "run").results()
    assert tuple(results) == NAMES
    panels = {name: draw(name, {"run": results[name]}) for name in NAMES}
    assert all(p is not None and p.section == "growth" in SECTIONS for p in panels.values())
    assert grown.score is not None
    shown = panels["growth_score"]
    assert shown is not None
    assert len(shown.table) == 1 + len(grown.score.sites)
    assert [row[-1].split(" (")[0] for row in shown.table[1:]] == [
        site.verdict for site in grown.score.sites
    ]
    assert np.allclose(shown.charts[0].marks[0].y, [s.z for s in grown.score.sites])  # pyright: ignore[reportAttributeAccessIssue]
    history = panels["growth"]
    assert history is not None
    assert [row[3:5] for row in history.table[1:]] == [(r.paper, r.safe) for r in grown.rounds]
    search = next(c for c in history.charts if c.x.log)
    assert len(search.marks[0].x) == len(grown.rounds[0].tried)  # pyright: ignore[reportAttributeAccessIssue]
    certain = panels["growth_certificate"]
    assert certain is not None
    assert "vacuous" in certain.notes[0]
    page = report(tmp_path / "run", tmp_path / "page.html").read_text()
    assert all(said in page for said in ("Would a block help here?", "How it grew", "vacuous"))


def test_two_runs_stand_side_by_side_in_one_table() -> None:
    arms = tuple(
        Arm(name, seed, (0.0, 1.0, 2.0), (1.0, 0.5, loss))
        for seed in (0, 1)
        for name, loss in (("grown", 0.3), ("longer", 0.4), ("scratch", 0.9))
    )
    found = plain(Comparison(arms, {0: 0.4, 1: 0.4}, {"stacked": "no such block"}).to_json())
    panel = draw("growth_comparison", {"a": found, "b": found})
    assert panel is not None
    assert [row[:2] for row in panel.table[1:4]] == [
        ("a", x) for x in ("grown", "longer", "scratch")
    ]
    assert panel.table[1][-1] == "1.00, 1.00"
    assert panel.table[3][-1] == "never, never"
    assert panel.notes == ("a, stacked: no such block", "b, stacked: no such block")
    assert len(panel.charts) == 2


def test_sweeps_and_laws_are_drawn() -> None:
    rows = sweep(
        {"layers": [8, 14], "width": [4, 8], "seed": [0, 1]},
        lambda layers, width, seed: {"test_loss": layers / width + seed, "signal": 1 / layers},
        progress=False,
    ).rows()
    panel = draw("sweep", {"run": plain(rows)})
    assert panel is not None
    assert len(panel.charts) == 5  # two losses, two signals, one of them relative as well
    line: Any = panel.charts[0].marks[0]
    assert line.y.tolist() == [2.5, 4.0]
    outcome = {
        "fit": scaling.EPOCH.to_json(),
        "points": None,
        "plan": scaling.plan(flops=1e21).to_json(),
    }
    law = draw("scaling", {"run": plain(outcome)})
    assert law is not None
    assert law.table[1][:2] == ("law: E", "1.817")
    assert not law.notes
