"""The page: complete, self-contained, and harmless whatever the data holds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.results import HOSTILE, curve, every_kind, trace_of

from everydepth.errors import DataError
from everydepth.exits.evaluate import Evaluation
from everydepth.exits.profile import DepthProfile, Latency, Profile
from everydepth.reports import page, report
from everydepth.reports.cards import card
from everydepth.reports.markup import script_json, text
from everydepth.results import Results, gap, named, rows
from everydepth.runs import Run
from everydepth.tracing.parameters import kept_parameters

LINES = curve("accuracy", [0.1, 0.62, 0.9], "accuracy")
OTHER = curve("accuracy", [0.1, 0.895, 0.9], "accuracy")


class Parsed(HTMLParser):
    """What a browser would see: texts, tags with their attributes, and scripts that run."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def running_scripts(self) -> int:
        return sum(tag == "script" and "type" not in attrs for tag, attrs in self.tags)


def data_of(content: str) -> dict[str, Any]:
    found = re.search(r'id="page-data">(.*?)</script>', content, re.S)
    assert found is not None
    return json.loads(found[1])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "page.html"


def test_the_page_is_one_file_without_links_and_below_six_megabytes(out: Path) -> None:
    report(trace_of(*every_kind().values()), out)
    content = out.read_text()
    assert out.stat().st_size < 6e6
    parsed = Parsed(content)
    links = [value for _, attrs in parsed.tags for key, value in attrs.items() if key in _LINKS]
    assert links == ["data:,"]  # the icon, so that a browser does not ask a server for one
    assert "url(" not in page._asset("page.css")  # pyright: ignore[reportPrivateUsage]
    assert parsed.running_scripts == 1


_LINKS = ("src", "href", "action", "srcset", "data", "poster")


def test_only_the_two_scripts_of_the_page_may_run_and_nothing_may_be_fetched(out: Path) -> None:
    content = report(trace_of(LINES, depth=2), out).read_text()
    found = re.search(r'Content-Security-Policy" content="([^"]*)"', content)
    assert found is not None
    policy = found[1]
    assert "default-src 'none'" in policy
    assert re.fullmatch(r"script-src( 'sha256-[^']+'){2}", policy.split("; ")[-1])


@pytest.mark.parametrize("where", ["name", "title", "command", "note", "token", "label", "config"])
def test_text_from_data_is_shown_and_never_markup(where: str, tmp_path: Path, out: Path) -> None:
    result = LINES
    if where == "note":
        result = gap("accuracy", "curve", HOSTILE)
    elif where == "label":
        result = curve("custom", [1, 2, 3], HOSTILE)
    elif where == "token":
        result = every_kind(depth=2)["token_grid"]
    made = Run.create(tmp_path / "run", {"command": HOSTILE, "why": HOSTILE})
    trace_of(result, depth=2).save(made.path / "trace")
    name = HOSTILE if where == "name" else "run"
    source: Any = made.path if where == "config" else trace_of(result, depth=2, command=HOSTILE)
    report({name: source}, out, title=HOSTILE if where == "title" else "a")
    content = out.read_text()
    parsed = Parsed(content)
    assert parsed.running_scripts == 1
    assert "img" not in dict(parsed.tags)
    assert "<script>window" not in content
    shown = "".join(parsed.texts)
    if where != "label":  # which only the chart shows
        assert HOSTILE in shown


def test_json_in_a_script_cannot_end_it_nor_open_a_comment() -> None:
    content = {"</script>": ["<!--", "<script", "]]>", "&lt;", "\u2028", "\ud800"]}
    written = script_json(content)
    assert not set("<>&\u2028") & set(written)
    assert json.loads(written) == content
    with pytest.raises(ValueError, match="JSON"):
        script_json([float("nan")])


def test_what_is_no_character_is_still_written(out: Path) -> None:
    assert text("\ud800<") == "?&lt;"
    report({"a\udcff": trace_of(LINES, depth=2)}, out)
    assert "a?" in out.read_text()


def test_the_dial_says_what_each_depth_gives_up(out: Path) -> None:
    first = trace_of(LINES, kept_parameters([10, 60, 100]), depth=2)
    report({"E2E": first, "LPA": trace_of(OTHER, depth=2)}, out)
    found = data_of(out.read_text())
    assert found["depth"] == 2
    assert found["texts"][0] == [
        "10.0% accuracy, 80.0 points worse than full depth; 10% of the parameters.",
        "62.0% accuracy, 28.0 points worse than full depth; 60% of the parameters.",
        "90.0% accuracy at full depth; 100% of the parameters.",
    ]
    assert found["texts"][1][1] == "89.5% accuracy, 0.5 points worse than full depth."
    assert found["titles"] == [
        "Depth 0 of 2 · the embedding alone",
        "Depth 1 of 2",
        "Depth 2 of 2 · the whole network",
    ]
    assert found["start"] == 1  # within a point of full depth for LPA


def test_a_depth_that_is_better_or_as_good_is_called_so(out: Path) -> None:
    report(trace_of(curve("accuracy", [0.92, 0.9001, 0.9]), depth=2), out)
    words = data_of(out.read_text())["texts"][0]
    assert words[0] == "92.0% accuracy, 2.0 points better than full depth."
    assert words[1] == "90.0% accuracy, as good as full depth."


def test_errors_are_compared_as_multiples(out: Path) -> None:
    report(trace_of(curve("mse", [3.0, 0.5, 0.1]), depth=2), out)
    assert data_of(out.read_text())["texts"][0][1] == (
        "mean squared error 0.5, 5 times that of full depth."
    )


def test_the_headline_names_the_depth_that_suffices(out: Path) -> None:
    runs = {"E2E": trace_of(LINES, depth=2), "LPA": trace_of(OTHER, depth=2)}
    shown = "".join(Parsed(report(runs, out).read_text()).texts)
    assert "needs all of its 2 blocks for accuracy 90.0%." in shown
    assert "is within 1 point of its full accuracy (90.0%) at depth 1 of 2." in shown


def test_what_is_better_but_no_prediction_is_no_headline(out: Path) -> None:
    gain = replace(LINES, name="gain", title="Gain", section="growth", better="higher", unit="")
    assert "its full gain" not in report(trace_of(gain, depth=2), out).read_text()
    judged = replace(gain, section="prediction", arrays={**gain.arrays, "value": np.ones(3)})
    assert "its full gain" in report(trace_of(judged, depth=2), out).read_text()


def test_what_a_trace_and_a_profile_both_measured_is_shown_once(tmp_path: Path, out: Path) -> None:
    made = Run.create(tmp_path / "run", {})
    more = curve("loss", [3.0, 2.0, 1.0])
    trace_of(LINES, kept_parameters([10, 60, 100]), more, depth=2).save(made.path / "trace")
    later, other = curve("accuracy", [0.62, 0.9], first=1), kept_parameters([10, 50, 100])
    trace_of(later, other, depth=2).save(made.path / "quick_look")
    shown = Parsed(report(made.path, out).read_text()).texts
    assert shown.count("Accuracy") == 1
    assert "Accuracy · quick look" not in shown
    assert "Parameters · quick look" in shown


def test_where_nothing_has_a_depth_the_dial_turns_layers(out: Path) -> None:
    arrays = {"layer": np.array([1, 2]), "value": np.ones(2)}
    by_layer = replace(LINES, axis="layer", arrays=arrays, section="blocks", unit="share")
    content = report(Results(results=named(by_layer), kind="ablation"), out).read_text()
    found = data_of(content)
    assert (found["first"], found["titles"][1:]) == (1, ["Layer 1 of 2", "Layer 2 of 2"])
    assert 'min="1" max="2"' in content
    assert found["texts"] == [["undefined here", "100.0%", "100.0%"]]  # nothing else to say


def test_a_shallower_network_stays_at_its_last_depth(out: Path) -> None:
    deep = curve("accuracy", [0.1, 0.2, 0.3, 0.4])
    report({"deep": trace_of(deep, depth=3), "flat": trace_of(LINES, depth=2)}, out)
    found = data_of(out.read_text())
    assert found["depth"] == 3
    assert found["texts"][1][3] == "ends at depth 2: 90.0% accuracy at full depth."
    assert all(len(texts) == 4 for texts in found["texts"])


def test_a_new_metric_is_drawn_by_its_kind_and_a_gap_says_why(out: Path) -> None:
    own = curve("my_own_metric", [1, 2, 3], "furlongs (fn)")
    report(trace_of(own, gap("cka", "matrix", "one sample"), depth=2), out)
    shown = "".join(Parsed(out.read_text()).texts)
    assert "My own metric" in shown
    assert "one sample" in shown
    assert "furlongs (fn)" in json.dumps(data_of(out.read_text())["charts"])


def test_a_result_that_cannot_be_drawn_is_said_and_the_others_are_shown(out: Path) -> None:
    grid = every_kind(2)["token_grid"]
    arrays = {**grid.arrays, "probability": grid.arrays["text"]}
    broken = replace(grid, name="loss", arrays=arrays)
    shown = "".join(Parsed(report(trace_of(LINES, broken, depth=2), out).read_text()).texts)
    assert "loss could not be drawn (ValueError:" in shown
    assert "90.0% accuracy" in json.dumps(data_of(out.read_text()))
    assert card({"a": broken}).title == "Token grid"


def test_results_of_any_verb_are_shown_under_their_own_words(tmp_path: Path, out: Path) -> None:
    table = rows("found", {"where": ["attic"], "count": [3]}, title="Spiders", section="the house")
    effort = replace(
        LINES, name="effort", title="Effort", about="Sweat.", section="cost", better="lower"
    )
    mine = Results(results=named(effort, table), kind="my study")
    made = Run.create(tmp_path / "run", {})
    mine.save(made.path / "mine")
    parsed = Parsed(report(made.path, out).read_text())
    shown = "".join(parsed.texts)
    for said in ("Effort", "Sweat.", "Spiders", "The house", "attic", "What each depth costs"):
        assert said in shown
    assert data_of(out.read_text())["texts"][0][0] == "11% of the effort."


def test_time_and_exits_are_shown(tmp_path: Path, out: Path) -> None:
    made = Run.create(tmp_path / "run", {})
    trace_of(LINES, depth=2).save(made.path / "trace")
    costs = ("parameters", "checkpoint_bytes", "flops", "peak_bytes")
    depths = [
        DepthProfile(
            depth=k,
            quality=0.3 * k,
            **dict.fromkeys(costs, 100 * k),
            latency=Latency(median=2.0 * k, low=1.0 * k, high=3.0 * k),
            batch_latency=Latency(median=5.0 * k, low=4.0 * k, high=6.0 * k),
        )
        for k in (1, 2)
    ]
    Profile.of(depths, metric="accuracy", batch_size=32, model="M", samples=50).save(
        made.path / "profile"
    )
    found = {"accuracy": 0.5, "accuracy_full": 0.6, "agreement": 0.9, "mean_depth": 1.25}
    speed = {"measured_speedup": 1.5, "layer_speedup": 1.6, "seconds": 1.0, "seconds_full": 1.5}
    Evaluation.of([75, 25], {**found, **speed}).save(made.path / "exits")
    report(made.path, out)
    content = out.read_text()
    texts = data_of(content)["texts"]
    assert texts[0][0] == "10.0% accuracy, 80.0 points worse than full depth."
    assert texts[0][1].endswith("28.0 points worse than full depth; 50% of the time of a batch.")
    assert [
        "0.0% here, 0.0% so far",
        "75.0% here, 75.0% so far",
        "25.0% here, 100.0% so far",
    ] in texts
    assert "<td>1.5</td>" in content


def test_training_is_shown_with_a_line_a_run_and_thinned_to_what_a_screen_shows(
    tmp_path: Path, out: Path
) -> None:
    for name in ("a", "b"):
        made = Run.create(tmp_path / name, {"command": f"everydepth train --name {name}"})
        for step in range(1000):
            valid = {"loss": [3, 2], "by_depth": {"1": 3, "2": 2}}
            made.log({"step": step, "loss": 1 / (step + 1), "valid": valid, "ok": True})
        trace_of(LINES, depth=2).save(made.path / "trace")
    report([tmp_path / "a", tmp_path / "b"], out)
    content = out.read_text()
    charts = [c["figure"] for c in data_of(content)["charts"]]
    titles = [chart["layout"]["yaxis"]["title"]["text"] for chart in charts]
    assert titles[-3:] == ["loss", "valid.loss", "valid.by_depth"]
    for chart in charts[-2:]:
        assert [line["name"] for line in chart["data"]][:2] == ["a · depth 1", "a · depth 2"]
    lines = charts[-3]["data"]
    assert [line["name"] for line in lines] == ["a", "b"]
    assert 200 <= len(lines[0]["x"]) <= 400
    assert "everydepth train --name b" in content


def test_where_it_came_from_is_on_the_page(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bin/everydepth", "train", "-m", "vit"])
    made = Run.create(tmp_path / "run", {"lr": 0.25})
    trace_of(LINES, depth=2, command="everydepth trace x").save(made.path / "trace")
    report(made.path, out, command="everydepth report run")
    shown = "".join(Parsed(out.read_text()).texts)
    for part in ("everydepth train -m vit", "everydepth trace x", "everydepth report run", "0.25"):
        assert part in shown
    assert "torch" in shown


def test_every_curve_is_in_the_table_of_numbers(out: Path) -> None:
    content = report(trace_of(LINES, curve("loss", [3, 2], first=1), depth=2), out).read_text()
    assert '<tr data-depth="1" data-last="2"><td>1</td><td>0.6200</td><td>3</td></tr>' in content
    assert '<tr data-depth="0" data-last="2"><td>0</td><td>0.1000</td><td>-</td></tr>' in content


def test_runs_of_one_name_are_told_apart(out: Path) -> None:
    content = report([trace_of(LINES, depth=2)] * 2, out).read_text()
    assert "Sample (2)" in content


def test_a_page_beyond_the_limit_and_a_run_without_depths_are_errors(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="no results in new, so there is nothing to show; run"):
        report(Run.create(tmp_path / "new", {}).path, out)
    with pytest.raises(DataError, match="there are no runs"):
        report([], out)
    monkeypatch.setattr("everydepth.reports.write.LARGEST_PAGE", 1000)
    with pytest.raises(DataError, match=r"the page would have .* MB, but 0 MB is the limit"):
        report(trace_of(LINES, depth=2), out)
    assert not out.exists()
