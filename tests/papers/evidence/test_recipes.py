"""Every recipe: its smoke preset runs, its paper preset is whole, its results are not stale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from everydepth_papers.evidence import dry_run, reproduce
from everydepth_papers.evidence.discover import load_recipe, recipe_files
from everydepth_papers.evidence.docs import pages, recorded
from everydepth_papers.evidence.index import INDEX, NUMBERED, about, mentioned, unknown
from everydepth_papers.evidence.recipe import Row
from everydepth_papers.paper import PAPERS
from everydepth_papers.verdict import VERDICTS

FILES = recipe_files()
DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", FILES)
def test_smoke_preset_runs_without_data_or_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EVERYDEPTH_DATA", raising=False)
    recipe = load_recipe(FILES[name])
    found = reproduce(recipe, "smoke", run=tmp_path / "out", progress=False)
    assert found.rows
    assert any(row.measured is not None for row in found.rows)
    if recipe.figure is not None:
        recipe.figure(found.finished)


@pytest.mark.parametrize("name", FILES)
def test_paper_preset_can_be_planned_without_data_or_memory(name: str) -> None:
    plan = dry_run(load_recipe(FILES[name]), "paper")
    assert plan["cells"]
    assert plan["launch"]


@pytest.mark.parametrize("name", FILES)
def test_recorded_results_are_what_the_recipe_makes_of_its_cells(name: str) -> None:
    recipe = load_recipe(FILES[name])
    for found in recorded(FILES[name].parent):
        assert json.loads(json.dumps([row.to_json() for row in recipe.rows(found.finished)])) == [
            row.to_json() for row in found.rows
        ]


def test_the_pages_of_results_are_up_to_date() -> None:
    for name, text in pages(DOCS.parent).items():
        written = (DOCS / name).read_text(encoding="utf-8")
        assert written == text, f"{name}: run everydepth reproduce --docs docs/results.md"


def test_the_index_has_every_numbered_table_and_figure_once() -> None:
    assert unknown() == set()
    for key, kinds in NUMBERED.items():
        for kind, count in kinds.items():
            found = [n for i in INDEX if (i.paper, i.kind) == (key, kind) for n in i.numbers]
            assert sorted(found) == list(range(1, count + 1)), (key, kind)
    assert all(item.recipes or item.why for item in INDEX)


def test_a_table_or_figure_that_was_measured_has_a_verdict() -> None:
    for item in INDEX:
        for recipe in item.recipes:
            rows = [row for found in recorded(FILES[recipe].parent) for row in found.rows]
            assert any(about(item, row) and row.measured in VERDICTS for row in rows), item


def test_rows_say_what_of_the_paper_they_are_about() -> None:
    assert mentioned("Fig. 3, 11, 5% noise: removing") == {("Figure", 3), ("Figure", 11)}
    assert mentioned("cifar10, Fig. 2(c, d): signal") == {("Figure", 2)}
    assert mentioned("Fig. 1b/4b/14: accuracy") == {("Figure", 1), ("Figure", 4), ("Figure", 14)}
    assert mentioned("Table 3: GPT-3 Small, depth") == {("Table", 3)}
    assert mentioned("margin (Fig. 3)") == {("Figure", 3)}
    assert mentioned("plain: see Fig. 3") == set()


def test_every_paper_has_a_summary_and_tiny_numbers_are_shown_as_nothing() -> None:
    page = pages(DOCS.parent)["results.md"]
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == [
        paper.name for paper in PAPERS.values()
    ]
    assert Row("change", None, 4.737e-15).cells[2] == "0"


def test_the_page_on_when_lpa_wins_shows_the_recorded_figures() -> None:
    page = (DOCS / "when-lpa-wins.md").read_text(encoding="utf-8")

    def line(setting: str) -> str:
        return next(text for text in page.splitlines() if text.startswith(f"| {setting} |"))

    (table,) = recorded(FILES["progressive_table1"].parent)
    (grid,) = recorded(FILES["progressive_table1_grid"].parent)
    found = {row.quantity: row for row in (*table.rows, *grid.rows)}
    seeds = table.about["seeds"]
    mean = "geometric mean of 8 surfaces"
    for setting, quantity in {
        "Adam, cosine, 30,000 steps: converged": f"final MSE / end-to-end, lpa, {mean}",
        "the same, early weights annealed to 0": f"final MSE / end-to-end, lpa_annealed, {mean}",
        "Adam, 300 full-batch steps, rate 0.001": (
            "300 full-batch steps, rate 0.001: final MSE / end-to-end, lpa"
        ),
        "Adam, 300 full-batch steps, rate 0.01": (
            "300 full-batch steps, rate 0.01: final MSE / end-to-end, lpa"
        ),
    }.items():
        ratio, low, high = (
            f"{getattr(found[quantity], name):.2f}" for name in ("measured", "low", "high")
        )
        assert line(setting) == f"| {setting} | {ratio} ({low} to {high}) | - | {seeds} |"
    for by, rate in ((by, rate) for by in ("Adam", "Adam, cosine") for rate in (0.001, 0.003)):
        quantity = f"two maps, {by} {rate:g}: MSE, LPA / end-to-end"
        plain, faster = (
            f"{found[name].measured:.2f}"
            for name in (quantity, f"{quantity} at 1.5 times the rate")
        )
        setting = f"{by}, 1,000 steps, rate {rate:g}"
        assert line(setting) == f"| {setting} | {plain} | {faster} | {grid.about['seeds']} |"


def panels(name: str) -> dict[str, Any]:
    """The panels of the figure of recorded results, by their title."""
    recipe = load_recipe(FILES[name])
    assert recipe.figure is not None
    page = recipe.figure(recorded(FILES[name].parent)[-1].finished)
    assert page is not None
    return {axis.get_title(): axis for axis in page.axes}


def test_the_figures_of_residual_relay_have_a_panel_for_each_kind() -> None:
    shared = {
        "memorization %",
        "test accuracy %",
        "gradient norm",
        "margin without a layer's skips",
        "std of the stream",
        "std of weights",
        "prediction error",
        "margin and gradient norm",
    }
    in_training = {"gradient norm in training", "margin in training"}
    assert set(panels("residual_removal_vision")) == shared | in_training
    assert set(panels("residual_removal_language")) == shared | {"skips of layer 1 scaled by c"}
    labels = panels("residual_noise")["test accuracy %"].get_legend_handles_labels()[1]
    assert labels == [f"{share}% wrong labels" for share in (1, 5, 10, 20)]


def test_exits_are_drawn_counted_and_by_the_clock() -> None:
    swept = panels("tracing_vision")["exits, thresholds swept"]
    assert [line.get_linestyle() for line in swept.lines] == ["-", "--"] * 2
    counted, measured = swept.lines[:2]
    assert list(counted.get_ydata()) == list(measured.get_ydata())
    assert list(counted.get_xdata()) != list(measured.get_xdata())
