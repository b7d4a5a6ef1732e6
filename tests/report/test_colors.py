"""A run has one color on the whole page, also in cards that show only some of the runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.helpers.results import every_kind, trace_of

from everydepth.exits.evaluate import Evaluation
from everydepth.reports import report
from everydepth.results.figures.chart import PALETTE
from everydepth.runs import Run


def test_a_card_of_the_second_run_alone_has_the_second_color(tmp_path: Path) -> None:
    trace = trace_of(next(iter(every_kind().values())))
    for name in ("first", "second"):
        run = Run.create(tmp_path / name, {})
        trace.save(run.path / "trace")
    Evaluation.of([3, 1, 0, 0], {}).save(run.path / "exits")
    page = report({n: tmp_path / n for n in ("first", "second")}, tmp_path / "page.html")
    found = re.search(r'id="page-data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    figures = [chart["figure"]["data"] for chart in json.loads(found[1])["charts"]]
    (bars,) = [mark for figure in figures for mark in figure if mark["type"] == "bar"]
    assert "<figcaption>second</figcaption>" in page.read_text()
    assert bars["marker"]["color"] == PALETTE[1]
