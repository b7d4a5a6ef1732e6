"""Every result has a figure for paper and one for the screen, and both say the same."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from PIL import Image
from tests.helpers.results import HOSTILE, curve, every_kind
from transformers import ViTConfig, ViTForImageClassification

from everydepth.errors import SettingError
from everydepth.results.figures import figure
from everydepth.results.figures.chart import Bars, Boxes, Chart, Dots, Heat, Line
from everydepth.results.figures.kinds import charts
from everydepth.results.figures.mpl import WIDTH
from everydepth.results.result import Result
from everydepth.tracing import Trace, gap, trace

ONE = every_kind()
TWO = {name: {"E2E": ONE[name], "LPA": other} for name, other in every_kind(seed=1).items()}


def only(result: Any) -> Chart:
    (chart,) = charts(result if isinstance(result, dict) else {"": result})
    return chart


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("backend", ["matplotlib", "plotly"])
def test_every_kind_has_a_figure_of_one_and_of_two_runs(name: str, backend: str) -> None:
    for given in (ONE[name], TWO[name]):
        drawn = figure(given, backend)
        if backend == "plotly":
            assert len(drawn.data) >= 1
            assert drawn.to_json()
        else:
            drawn.draw_without_rendering()
            assert drawn.axes[0].has_data()


@pytest.fixture(scope="module")
def traced() -> Trace:
    """Every metric of a real model."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        num_labels=3,
    )
    model = ViTForImageClassification(config)
    batches = [
        {"pixel_values": torch.randn(24, 1, 8, 8), "labels": torch.arange(24) % 3} for _ in range(2)
    ]
    plain = trace(model, batches, progress=False)
    more = ["gradient_norm", "gradient_mean", "gradient_covariance", "branch_contributions"]
    extra = trace(model, batches, more, progress=False)
    return replace(plain, results={**plain.results, **extra.results})


def test_every_metric_of_a_real_trace_can_be_drawn_in_both_backends(traced: Trace) -> None:
    assert len(traced) > 15
    for name, result in traced.results.items():
        traced.plot(name).draw_without_rendering()
        assert traced.plot(name, "plotly").data
        assert figure({"a": result, "b": result}).axes
        assert figure({"a": result, "b": result}, "plotly").data


def test_a_figure_for_paper_is_half_a_page_wide_with_letters_of_at_least_seven_points() -> None:
    for name in ("accuracy", "margin", "cos", "saturation"):
        drawn = figure(ONE[name])
        assert drawn.get_figwidth() == WIDTH == 3.3
        axes = drawn.axes[0]
        texts = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels()]
        assert min(text.get_fontsize() for text in texts) >= 7


def test_axes_say_what_they_count_and_in_which_unit() -> None:
    axes = figure(ONE["loss"]).axes[0]
    assert axes.get_xlabel() == "depth (blocks)"
    assert axes.get_ylabel() == "cross-entropy (nat)"
    layout = figure(ONE["loss"], "plotly").layout
    assert layout.xaxis.title.text == "depth (blocks)"
    assert layout.yaxis.title.text == "cross-entropy (nat)"


def test_large_numbers_on_an_axis_are_shortened() -> None:
    drawn = figure(curve("size", [2e5, 4e5, 8e5]))
    drawn.canvas.draw()
    assert [t.get_text() for t in drawn.axes[0].get_yticklabels()][1:3] == ["200k", "400k"]
    small = figure(curve("size", [0.2, 0.4, 0.8]))
    small.canvas.draw()
    assert "0.2" in [t.get_text() for t in small.axes[0].get_yticklabels()]


def test_both_backends_draw_the_same_numbers() -> None:
    line = figure(ONE["accuracy"]).axes[0].lines[0]
    drawn: Any = figure(ONE["accuracy"], "plotly").data[0]
    np.testing.assert_allclose(line.get_ydata(), np.array(drawn.y, float), rtol=1e-5)
    np.testing.assert_array_equal(line.get_xdata(), np.array(drawn.x))


def test_an_undefined_value_leaves_a_gap_and_its_box_is_left_out() -> None:
    masked = np.ma.masked_array([0.5, 0.0, 0.9], mask=[False, True, False])
    quantiles = {name: np.array([0.1, 0.0, 0.2]) for name in ("q05", "q25", "q50", "q75", "q95")}
    result = curve("margin", [0, 0, 0])
    result = replace(result, arrays={**result.arrays, "value": masked, **quantiles})
    boxes, line = only(result).marks
    assert isinstance(boxes, Boxes)
    assert isinstance(line, Line)
    assert boxes.x.tolist() == [0, 2]
    assert np.isnan(line.y).tolist() == [False, True, False]
    assert list(figure(result, "plotly").data[1].y) == [0.5, None, 0.9]


def test_three_decades_make_a_logarithmic_axis_but_a_share_never_does() -> None:
    assert only(ONE["loss"]).y.log
    small = curve("accuracy", [1e-5, 0.5, 1.0], "accuracy")
    assert not only(small).y.log


def test_quantities_without_a_common_unit_get_a_chart_each() -> None:
    drawn = charts({"": ONE["collapse"]})
    assert [chart.title for chart in drawn] == ["NC1", "NC3"]
    assert [chart.y.label for chart in drawn] == ["NC1, variance", "NC3, distance"]


def test_series_of_one_quantity_share_a_chart_and_are_named_by_their_first_words() -> None:
    result = curve("gradient_norm", [3, 2, 1], "state: length (nat)", mlp=np.array([1.0, 2, 3]))
    labels = {**result.labels, "mlp": "mlp: length (nat)"}
    result = replace(result, series=("value", "mlp"), labels=labels)
    chart = only(result)
    assert chart.names == {"state", "mlp"}
    assert chart.y.title == "length (nat)"


def test_several_runs_have_a_color_each_and_matrices_share_one_scale() -> None:
    lines = only(TWO["accuracy"]).marks
    assert [(mark.name, mark.color) for mark in lines if isinstance(mark, Line)] == [
        ("E2E", 0),
        ("LPA", 1),
    ]
    heats = [mark for chart in charts(TWO["cos"]) for mark in chart.marks]
    assert all(isinstance(heat, Heat) for heat in heats)
    assert len({(heat.low, heat.high) for heat in heats if isinstance(heat, Heat)}) == 1


def test_a_histogram_shows_shares_that_add_up_to_all() -> None:
    bars, cumulative = only(ONE["saturation"]).marks
    assert isinstance(bars, Bars)
    assert isinstance(cumulative, Line)
    assert bars.y.sum() == pytest.approx(100)
    np.testing.assert_allclose(np.cumsum(bars.y), cumulative.y)


def test_a_table_of_whole_numbers_becomes_a_map_of_counts() -> None:
    (heat,) = only(ONE["when"]).marks
    assert isinstance(heat, Heat)
    final, right = (ONE["when"].arrays[name] for name in ("final", "right"))
    assert np.nansum(heat.z) == len(final)
    row, column = right[0] - heat.y[0], final[0] - heat.x[0]
    assert heat.z[row, column] == ((final == final[0]) & (right == right[0])).sum()


def test_matrix_quantiles_give_a_box_plot_of_the_last_column() -> None:
    result = ONE["cos"]
    spread = dict.fromkeys(("q05", "q25", "q50", "q75", "q95"), result.value * 0.9)
    result = replace(result, arrays={**result.arrays, **spread})
    heat, boxes = charts({"": result})
    assert heat.is_heat
    assert boxes.title == "Cos with the last depth"
    (found, _) = boxes.marks
    assert isinstance(found, Boxes)
    np.testing.assert_allclose(found.quantiles[2], result.value[:, -1] * 0.9)


def test_words_from_data_are_shown_as_they_are() -> None:
    drawn = figure(ONE["token_grid"])
    drawn.draw_without_rendering()  # a lone dollar would be an error if it were mathematics
    assert {"<script>", "$x$"} <= {text.get_text() for text in drawn.axes[0].texts}
    heat: Any = figure(ONE["token_grid"], "plotly").data[0]
    assert heat.text[0][0] == "&lt;script&gt;"
    assert HOSTILE not in figure(ONE["token_grid"], "plotly").to_json()
    named = figure({"<b>": ONE["accuracy"], "c": ONE["accuracy"]}, "plotly")
    assert named.data[0].name == "&lt;b&gt;"


def test_drawing_changes_no_setting_of_matplotlib_and_needs_no_pyplot(tmp_path: Path) -> None:
    def settings() -> dict[str, Any]:
        # matplotlib itself decides on its backend when it is first needed.
        return {key: value for key, value in dict.items(mpl.rcParams) if key != "backend"}

    before = settings()
    figure(ONE["accuracy"]).savefig(tmp_path / "a.png", dpi=300)
    assert settings() == before
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.width == round(3.3 * 300)
    script = """
import sys
import everydepth.results.figures
print([name for name in ("matplotlib", "plotly") if name in sys.modules])
from everydepth.results.figures import figure
from everydepth.results.result import Result
import numpy as np
depth = np.arange(3)
r = Result(name="a", kind="curve", series=("v",), arrays={"depth": depth, "v": depth})
figure(r).draw_without_rendering()
print([name for name in ("matplotlib.pyplot", "plotly") if name in sys.modules])
"""
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert finished.stdout == "[]\n[]\n"


def test_a_pdf_holds_its_letters_as_letters(tmp_path: Path) -> None:
    figure(ONE["accuracy"]).savefig(tmp_path / "a.pdf")
    content = (tmp_path / "a.pdf").read_bytes()
    assert b"/FontFile2" in content  # TrueType
    assert b"/Type3" not in content


def test_a_point_of_a_table_whose_place_is_undefined_is_not_drawn() -> None:
    first = np.ma.masked_array([2.0, 0.0, 1.0], mask=[False, True, False])
    arrays = {"x": first, "y": np.array([1.0, 2.0, 3.0]), "name": np.array(["a", "b", "c"])}
    found = Result(name="t", kind="table", series=("name", "x", "y"), arrays=arrays)
    ((mark,),) = (chart.marks for chart in charts({"": found}))
    assert isinstance(mark, Dots)
    assert np.isnan(mark.x).tolist() == [False, True, False]
    assert mark.text == ("a", "b", "c")


def test_a_gap_and_an_unknown_backend_are_errors() -> None:
    with pytest.raises(SettingError, match="nc1 cannot be drawn: a single class; measure again"):
        figure(gap("nc1", "curve", "a single class"))
    with pytest.raises(SettingError, match="backend 'gnuplot'; use 'matplotlib' or 'plotly'"):
        figure(ONE["loss"], "gnuplot")
    text = np.array(["a", "b"])
    words = replace(ONE["once"], name="words", series=("text",), arrays={"text": text})
    with pytest.raises(SettingError, match="words has columns text, none of which holds numbers"):
        figure(words)


def test_a_grid_that_is_a_gap_says_why() -> None:
    assert str(gap("token_grid", "grid", "no text")).splitlines() == ["Token grid", "no text"]


def test_a_gap_among_runs_is_left_out() -> None:
    runs = {"a": gap("loss", "curve", "no labels"), "b": ONE["loss"], "c": ONE["loss"]}
    assert only(runs).names == {"b", "c"}
