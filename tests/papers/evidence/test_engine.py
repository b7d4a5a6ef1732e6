"""The engine: a recipe is found, run once, resumed, compared; and what cannot start says why."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.processes import launch
from typer.testing import CliRunner

import everydepth as ed
from everydepth.cli.main import build_app
from everydepth.environment import machine
from everydepth.errors import DataError, SettingError
from everydepth.results import Results
from everydepth_papers.evidence import (
    Finished,
    Preset,
    Recipe,
    Reproduction,
    Row,
    data_folder,
    dry_run,
    find_recipe,
    find_recipes,
    over_seeds,
    reproduce,
)
from everydepth_papers.evidence.docs import recorded, tables_page

RECIPE = '''
"""A recipe for tests."""
import time
from everydepth_papers.evidence import Preset, Recipe, Row, over_seeds, published

PUBLISHED = published(__file__)

def cell(settings, seed, folder):
    with open({log!r}, "a") as file:
        file.write(f"{{settings}} {{seed}}\\n")
    time.sleep({pause})
    return {{"value": settings["a"] + 0.1 * seed}}

def rows(results):
    found = {{a: [r["value"] for r in results if r.cell["a"] == a] for a in (1, 2, 3)}}
    return [over_seeds(f"a = {{a}} [b]", PUBLISHED["value"], found[a]) for a in found]

def figure(results):
    from matplotlib.figure import Figure
    drawn = Figure()
    drawn.subplots().plot([r["value"] for r in results])
    return drawn

def model():
    from torch import nn
    return nn.Linear(1_000_000, 1_000_000)

CELLS = ({{"a": 1}}, {{"a": 2}}, {{"a": 3}})
RECIPE = Recipe(
    name="900_demo", title="A <demo>", item="Another Paper, Table 1", cell=cell, rows=rows,
    figure=figure, about="Nothing is trained.",
    presets={{
        "smoke": Preset(cells=CELLS, seeds=3, cost="1 s"),
        "small": Preset(cells=CELLS, cost="1 min", needs=("imagined-set",)),
        "paper": Preset(cells=CELLS, cost="9 days", needs=("owner/set",), memory_gib=1e6,
                        models={{"wide": model}}, launch="accelerate launch"),
    }},
)
'''


def recipes_in(folder: Path, pause: float = 0.0) -> Path:
    home = folder / "recipes" / "nested" / "900_demo"
    home.mkdir(parents=True)
    (home / "recipe.py").write_text(RECIPE.format(log=str(folder / "log"), pause=pause))
    (home / "published.json").write_text('{"source": "Table 1", "value": 1.5}')
    return folder / "recipes"


def invoke(*words: object) -> Any:
    done = CliRunner().invoke(build_app(), [str(w) for w in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_a_recipe_runs_once_and_compares_published_with_measured(tmp_path: Path) -> None:
    recipe, home = find_recipe("900_demo", recipes_in(tmp_path))
    assert home.name == "900_demo"
    found = reproduce(recipe, run=tmp_path / "out", progress=False)
    assert found.rows[0] == Row("a = 1 [b]", 1.5, 1.1, 1.0, 1.2, "3 seeds")
    assert [r.seed for r in found.finished] == [0] * 3 + [1] * 3 + [2] * 3
    again = reproduce(recipe, run=tmp_path / "out", progress=False)
    assert again.rows == found.rows
    assert again.finished == found.finished
    assert len((tmp_path / "log").read_text().splitlines()) == 9
    assert reproduce(recipe, progress=False).rows == found.rows  # without a directory
    assert Reproduction.of_json(json.loads(json.dumps(dict(found.about)))).rows == found.rows
    assert Results.load(tmp_path / "out" / "reproduction").table() == found.table()


def test_more_seeds_add_cells_and_repeat_none(tmp_path: Path) -> None:
    recipe, _ = find_recipe("900_demo", recipes_in(tmp_path))
    reproduce(recipe, seeds=1, run=tmp_path / "out", progress=False)
    found = reproduce(recipe, seeds=2, run=tmp_path / "out", progress=False)
    assert found.about["seeds"] == 2
    assert len((tmp_path / "log").read_text().splitlines()) == 6
    assert found.about["command"].endswith("--preset smoke --seeds 2")


def test_recorded_cells_are_not_done_again_and_keep_their_machine(tmp_path: Path) -> None:
    folder = recipes_in(tmp_path)
    words = ["reproduce", "900_demo", "--recipes", folder, "--run"]
    invoke(*words, tmp_path / "first", "--seeds", "1", "--record")
    recipe, home = find_recipe("900_demo", folder)
    file = home / "results" / "smoke.json"
    before = json.loads(file.read_text())
    before["machine"]["date"] = "1999-12-31"
    file.write_text(json.dumps(before))
    assert "9 cells, 3 done" in invoke(*words, tmp_path / "b", "--recorded", "--dry-run").stdout
    log = (tmp_path / "log").read_text().splitlines()
    invoke(*words, tmp_path / "second", "--seeds", "2", "--recorded", "--record")
    assert len((tmp_path / "log").read_text().splitlines()) == len(log) + 3
    found = recorded(home)[0]
    assert found.rows == reproduce(recipe, seeds=2, progress=False).rows
    dates = [one.machine and one.machine["date"] for one in found.finished]
    assert dates == ["1999-12-31"] * 3 + [None] * 3
    page = tables_page(folder)
    assert "2 seed(s), 6 cells" in page
    assert "3 cells: 1999-12-31, " in page
    with pytest.raises(SettingError, match="all 6 cells of 900_demo, preset smoke, are in"):
        invoke(*words, tmp_path / "third", "--seeds", "2", "--recorded")
    assert "Measured with other settings" not in page
    code = home / "recipe.py"
    changed = code.read_text().replace("Nothing is trained.", "Nothing is trained twice.")
    code.write_text(changed.replace('{"a": 3}', '{"a": 4}'))
    then = "*Measured with other settings than the preset has today. Then: Nothing is trained.*"
    assert then in tables_page(folder)
    with pytest.raises(SettingError, match="900_demo is described differently since"):
        invoke(*words, tmp_path / "third", "--recorded")
    file.unlink()
    with pytest.raises(SettingError, match=r"900_demo has no results/smoke\.json"):
        invoke(*words, tmp_path / "third", "--recorded")


def test_a_killed_recipe_resumes_to_the_same_result(tmp_path: Path) -> None:
    folder = recipes_in(tmp_path, pause=0.1)
    log = tmp_path / "log"
    command = [sys.executable, "-m", "everydepth", "reproduce", "900_demo"]
    command += ["--recipes", str(folder), "--run", str(tmp_path / "out")]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    killed = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    while not log.exists() or len(log.read_text().splitlines()) < 3:
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    before = len(log.read_text().splitlines())
    assert before < 9
    recipe, _ = find_recipe("900_demo", folder)
    resumed = reproduce(recipe, run=tmp_path / "out", progress=False)
    # Only the cell that was running when the process died has run twice.
    assert len(log.read_text().splitlines()) <= 10
    assert resumed.rows == reproduce(recipe, progress=False).rows


@pytest.mark.slow
def test_processes_of_accelerate_share_the_cells_and_one_writes(tmp_path: Path) -> None:
    folder = recipes_in(tmp_path)
    words = ("-m", "everydepth", "reproduce", "900_demo", "--recipes", str(folder))
    done = launch(*words, "--run", str(tmp_path / "out"))
    assert done.stdout.count("a = 1 [b]") == 1
    assert len((tmp_path / "log").read_text().splitlines()) == 2 * 9
    recipe, _ = find_recipe("900_demo", folder)
    alone = reproduce(recipe, progress=False)
    assert Reproduction.load(tmp_path / "out" / "reproduction").rows == alone.rows


def test_a_failing_cell_keeps_its_folder_and_the_finished_cells_are_compared(
    tmp_path: Path,
) -> None:
    def cell(settings: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
        if settings["a"] == 2 and not (folder / "checkpoint").exists():
            (folder / "checkpoint").touch()
            raise ZeroDivisionError
        return {"resumed": (folder / "checkpoint").exists()}

    recipe = Recipe(
        name="x",
        title="",
        item="",
        cell=cell,
        rows=lambda results: [Row(str(r.cell["a"]), None, str(r["resumed"])) for r in results],
        presets={"smoke": Preset(cells=({"a": 1}, {"a": 2}), cost="")},
    )
    with pytest.raises(DataError, match="has no finished cell of x, preset smoke"):
        reproduce(recipe, run=tmp_path / "out", finished=True, progress=False)
    with pytest.raises(ZeroDivisionError):
        reproduce(recipe, run=tmp_path / "out", progress=False)
    part = reproduce(recipe, run=tmp_path / "out", finished=True, progress=False)
    assert [row.quantity for row in part.rows] == ["1"]
    assert part.about["planned"] == 2
    found = reproduce(recipe, run=tmp_path / "out", progress=False)
    assert "planned" not in found.about
    assert [row.measured for row in found.rows] == ["False", "True"]


def test_the_command_lists_runs_records_and_documents(tmp_path: Path) -> None:
    folder = recipes_in(tmp_path)
    listed = invoke("reproduce", "--list", "--recipes", folder).output
    assert "900_demo" in listed
    assert "Another Paper, Table 1: A <demo>" in listed
    assert "9 days" in listed
    how = ("reproduce", "900_demo", "--recipes", folder, "--run", tmp_path / "out")
    shown = invoke(*how, "--record").output
    assert re.search(r"a = 2 \[b\]\s+1.5\s+2.1\s+2 … 2.2\s+3 seeds", shown)
    home = folder / "nested" / "900_demo"
    written = json.loads((home / "results" / "smoke.json").read_text())
    assert written == dict(Reproduction.load(tmp_path / "out" / "reproduction").about)
    assert len(written["cells"]) == 9
    assert (tmp_path / "out" / "figure.png").stat().st_size > 1000
    stale = {**written, "rows": [{**row, "note": "stale"} for row in written["rows"]]}
    (home / "results" / "smoke.json").write_text(json.dumps(stale))
    invoke("reproduce", "--docs", tmp_path / "docs" / "results.md", "--recipes", folder)
    assert json.loads((home / "results" / "smoke.json").read_text()) == written
    text = (tmp_path / "docs" / "results.md").read_text()
    assert text == tables_page(folder)
    assert "| a = 3 [b] | 1.5 | 3.1 | 3 … 3.2 | 3 seeds |" in text
    assert (tmp_path / "docs" / "assets" / "results" / "900_demo-smoke.png").exists()


def test_a_dry_run_counts_without_memory_and_starts_nothing(tmp_path: Path) -> None:
    how = ("reproduce", "900_demo", "--preset", "paper", "--dry-run", "--recipes")
    shown = invoke(*how, recipes_in(tmp_path), "--run", tmp_path / "out").output
    assert "model wide: 1,000,001,000,000 parameters" in shown
    assert "3 cells, 0 done" in shown
    assert "data: owner/set" in shown
    assert "launch: accelerate launch -m everydepth reproduce 900_demo --preset paper" in shown
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "log").exists()


def test_what_cannot_start_says_why_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recipes_in(tmp_path)
    with pytest.raises(SettingError, match=r"no recipe '900_dema'; did you mean 900_demo\?"):
        find_recipe("900_dema", folder)
    with pytest.raises(SettingError, match=r"known are 900_demo\. .*--list` shows them all"):
        find_recipe("zzz", folder)
    recipe, _ = find_recipe("900_demo", folder)
    with pytest.raises(SettingError, match="no preset 'large'; use smoke, small, paper"):
        reproduce(recipe, "large")
    with pytest.raises(SettingError, match="0 seeds; use 1 or more, at most 10,000"):
        reproduce(recipe, seeds=0)
    with pytest.raises(SettingError, match=r"takes about 1e\+06 GiB, but this machine has .* free"):
        reproduce(recipe, "paper")
    monkeypatch.delenv("EVERYDEPTH_DATA", raising=False)
    with pytest.raises(DataError, match=r"small of 900_demo cannot start: it needs imagined-set.*"):
        reproduce(recipe, "small")
    monkeypatch.setenv("EVERYDEPTH_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"there is no folder imagined-set in .*EVERYDEPTH_DATA"):
        data_folder("imagined-set")
    (tmp_path / "imagined-set").mkdir()
    assert data_folder("imagined-set") == tmp_path / "imagined-set"
    assert not dry_run(recipe, "small")["missing"]
    with pytest.raises(SettingError, match=r"no folder of recipes at .*give one with --recipes"):
        find_recipes(tmp_path / "nowhere")
    with pytest.raises(SettingError, match=r"which recipe\?"):
        invoke("reproduce")


def test_a_recipe_file_that_is_none_is_explained(tmp_path: Path) -> None:
    home = tmp_path / "a"
    home.mkdir()
    (home / "recipe.py").write_text("x = 1\n")
    with pytest.raises(SettingError, match="defines no RECIPE"):
        find_recipes(tmp_path)
    (home / "recipe.py").write_text(RECIPE.format(log="", pause=0))
    (home / "published.json").write_text('{"value": 1}')
    with pytest.raises(SettingError, match="in a/ is called '900_demo'; give both one name"):
        find_recipes(tmp_path)
    with pytest.raises(SettingError, match="has the presets tiny; give smoke"):
        Recipe(
            name="x",
            title="",
            item="",
            cell=lambda *_: {},
            rows=lambda _: [],
            presets={"tiny": Preset(cells=(), cost="")},
        )


def test_a_report_shows_what_data_says_and_never_runs_it(tmp_path: Path) -> None:
    found = Reproduction.of(
        [Row("<b>", "<i>", float("nan"), note="<u>")],
        [Finished(cell={"<p>": 1}, seed=0, values={"<q>": 1}, seconds=0.0)],
        recipe="x",
        preset="smoke",
        title="<object>",
        source="&",
        about="",
        command="",
        seeds=1,
        seconds=1.0,
        machine=machine(),
    )
    page = ed.report(found.save(tmp_path / "found"), tmp_path / "page.html").read_text()
    body = page.split("<script>")[0]
    assert "&lt;object&gt;" in body
    for tag in ("<object>", "<b>", "<i>", "<u>", "<q>"):
        assert tag not in body


def test_a_report_shows_the_comparison_without_a_dial(tmp_path: Path) -> None:
    folder = recipes_in(tmp_path)
    invoke("reproduce", "900_demo", "--recipes", folder, "--run", tmp_path / "out")
    invoke("report", tmp_path / "out", "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<td>a = 2 [b]</td><td>1.5</td><td>2.1</td><td>2 … 2.2</td><td>3 seeds</td>" in page
    assert 'id="depth-now"' not in page.split("<script>")[0]


def test_a_mean_over_no_seed_is_said() -> None:
    assert over_seeds("x", 1.0, []).note == "no such cell in this preset"
    assert over_seeds("x", 1.0, [0.123456], digits=2) == Row("x", 1.0, 0.12, note="1 seed")


def test_the_machine_of_a_result_names_no_folder() -> None:
    assert not re.search(r"(^|[\s\"'])/[a-z]+/", json.dumps(machine()))
