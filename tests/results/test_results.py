"""One kind of answer: the same words mean the same on whatever a verb gives."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.helpers.results import HOSTILE, curve, every_kind, trace_of

from everydepth.errors import DataError, SettingError
from everydepth.results import Result, Results, Table, gap, named, provenance, rows, scalars
from everydepth.results import curve as lines

DEPTH = np.arange(3)


class Study(Results, kind="test study"):
    """A kind of its own."""


def study(*results: Result, **about: Any) -> Study:
    return Study(results=named(*results), about=about)


def test_results_are_a_mapping_from_names_to_arrays() -> None:
    found = study(curve("a", [1, 2]), curve("b", [3, 4]))
    assert found["b"].tolist() == [3, 4]
    assert list(found) == ["a", "b"]
    assert (len(found), "a" in found, "c" in found) == (2, True, False)
    with pytest.raises(SettingError, match="this test study has no 'aa'; did you mean 'a'"):
        found.result("aa")
    more = found.with_results(curve("c", [5])).with_about(seed=3)
    assert isinstance(more, Study)
    assert (list(more), more.about["seed"], "c" in found) == (["a", "b", "c"], 3, False)


def test_a_result_must_stand_under_its_own_name() -> None:
    with pytest.raises(SettingError, match="'x' holds 'a'; give each result under its own name"):
        Results(results={"x": curve("a", [1])})


def test_arrays_with_the_wrong_layout_for_their_kind_are_refused() -> None:
    with pytest.raises(SettingError, match="a has no array 'v', which `series` names"):
        Result(name="a", kind="curve", series=("v",), arrays={"depth": DEPTH})
    with pytest.raises(SettingError, match="a has no 'depth' for each value of 'v'"):
        Result(name="a", kind="curve", series=("v",), arrays={"v": DEPTH})
    with pytest.raises(SettingError, match="a has no 'step' for each value of 'v'"):
        Result(
            name="a",
            kind="bars",
            axis="step",
            series=("v",),
            arrays={"v": DEPTH, "step": DEPTH[:2]},
        )
    words = np.array(["x", "y", "z"])
    with pytest.raises(SettingError, match="the values of a are <U1, not numbers"):
        Result(name="a", kind="curve", series=("v",), arrays={"v": words, "depth": DEPTH})


def test_the_main_one_is_the_first_that_can_be_better() -> None:
    plain, good = curve("cos", [1, 2]), lines("quality", [1], [2.0], better="higher")
    assert study(plain, good).main.name == "quality"
    assert study(gap("x", "curve", "why"), plain).main.name == "cos"
    with pytest.raises(SettingError, match="this test study has no measurement with values"):
        _ = study(gap("x", "curve", "why")).main


def test_what_it_was_made_from_is_plain_json_with_versions() -> None:
    about = provenance(
        model="ViT", depth=3, settings={"c": (0.0, np.float32(0.5))}, path=np.int64(4), bad=np.nan
    )
    assert about["settings"] == {"c": [0.0, 0.5]}
    assert (about["path"], about["bad"], about["depth"]) == (4, None, 3)
    assert "samples" not in about
    assert {"everydepth", "torch"} <= set(about["versions"])


def test_the_table_joins_all_that_share_the_axis_of_the_main_one() -> None:
    found = study(
        lines("accuracy", [0, 1, 2], [0.1, np.nan, 0.9], unit="share", better="higher"),
        lines("size", [1, 2], [10_000_000, 20_000_000], unit="bytes"),
        lines("loss", [1, 5], [3.0, 2.0], axis="step"),
        scalars("speed", {"speed_up": 1.5}),
        gap("cka", "matrix", "one sample"),
    )
    table = found.table()
    assert table.headings == ("depth", "accuracy", "size")
    assert table.rows == ((0, 0.1, None), (1, None, 10_000_000), (2, 0.9, 20_000_000))
    assert table.cells[1] == ("1", "-", "10MB")
    assert table.notes == ("speed up: 1.5", "cka: one sample")
    assert found.table("loss").rows == ((1, 3.0), (5, 2.0))
    assert found.table("cka").notes == ("one sample",)
    assert not study(gap("x", "curve", "why")).table().rows


def test_a_family_is_a_table_of_rows_by_columns() -> None:
    arrays = {"layer": np.array([1, 2]), "columns": np.array([0.0, 0.5, 1.0]), "v": np.ones((2, 3))}
    family = Result(
        name="a", kind="family", axis="layer", series=("v",), arrays=arrays, better="higher"
    )
    table = study(family).table()
    assert table.headings == ("layer", "0", "0.5", "1")
    assert table.rows == ((1, 1.0, 1.0, 1.0), (2, 1.0, 1.0, 1.0))


def test_a_table_of_one_measurement_among_several_says_which() -> None:
    values = {"layer": np.array([1]), "columns": np.array([1]), "v": np.ones((1, 1))}
    one = Result(
        name="a", kind="matrix", axis="layer", series=("v",), arrays=values, title="Likeness"
    )
    assert study(one, curve("b", [1], [2.0])).table().title.splitlines()[-1] == "Likeness"


@pytest.mark.parametrize("name", every_kind())
def test_every_kind_has_a_table_in_text_html_markdown_and_pandas(name: str) -> None:
    table = trace_of(*every_kind().values()).table(name)
    assert isinstance(table, Table)
    assert len(str(table).splitlines()) >= 1 + len(table.rows)
    assert len(table.markdown().splitlines()) == 2 + len(table.rows)
    assert list(table.to_pandas().columns) == list(table.headings)
    assert "<script>" not in table._repr_html_()


def test_text_from_data_is_text_in_every_rendering() -> None:
    table = Table(headings=("[red]a", "b"), rows=((HOSTILE, 1), ("x|y", None)), title="[b]t")
    assert "<script>" not in table._repr_html_()
    assert "x\\|y" in table.markdown()
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(table)
    written = console.export_text()
    assert all(text in written for text in ("[red]a", "[b]t", HOSTILE))


def test_one_figure_holds_every_measurement_that_can_be_drawn() -> None:
    found = study(
        curve("a", [1, 2]),
        every_kind()["cos"],
        gap("x", "curve", "why"),
        rows("words", {"where": ["attic"]}),
    )
    figure = found.figure()
    assert [axes.get_title() for axes in figure.axes if axes.get_title()] == ["A", "Cos"]
    assert len(found.figure(["a"], backend="plotly").data) == 1
    assert found.plot().axes[0].get_title() == "A"
    with pytest.raises(SettingError, match="words is a table for reading; use"):
        found.figure(["words"])
    with pytest.raises(SettingError, match="x, words: nothing here can be drawn"):
        study(gap("x", "curve", "why"), rows("words", {"where": ["attic"]})).figure()


def test_a_share_is_drawn_in_percent_and_kept_as_it_is() -> None:
    found = study(lines("accuracy", [0, 1], [0.25, 0.5], unit="share"))
    axes = found.plot().axes[0]
    assert axes.lines[0].get_ydata().tolist() == [25.0, 50.0]
    assert axes.get_ylabel() == "accuracy (%)"
    assert found["accuracy"].tolist() == [0.25, 0.5]


def test_an_unbeaten_point_is_joined_and_every_point_is_named() -> None:
    arrays = {
        "latency": np.array([1.0, 3.0, 2.0]),
        "quality": np.array([0.5, 0.9, 0.4]),
        "front": np.array([True, True, False]),
        "text": np.array(["1", "2", "3"]),
    }
    points = Result(
        name="tradeoff", kind="scatter", axis="latency", series=("quality",), arrays=arrays
    )
    axes = study(points).plot().axes[0]
    assert axes.lines[0].get_xdata().tolist() == [1.0, 3.0]
    assert sorted(text.get_text() for text in axes.texts) == ["1", "2", "3"]


def test_bars_may_stand_on_words() -> None:
    axes = study(lines("a", ["x", "y"], [1.0, 2.0], axis="way", kind="bars")).plot().axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["x", "y"]


def test_rich_prints_results_as_their_table() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(trace_of(curve("accuracy", [0.5])))
    assert "depth  accuracy" in console.export_text()


def test_what_was_not_measured_is_undefined_and_not_zero() -> None:
    for values in ([None, 2.0], np.ma.masked_array([7.0, 2.0], mask=[True, False])):
        found = lines("latency", [1, 2], values).arrays["value"]
        assert np.ma.getmaskarray(found).tolist() == [True, False]
        assert found[1] == 2.0


def test_rows_of_different_lengths_are_no_array() -> None:
    said = r"\[1, \[2, 3\]\] is no array .*; give numbers or words, in rows of equal length"
    for make in (
        lambda: lines("x", [1, [2, 3]], [1.0, 2.0]),
        lambda: lines("x", [1, 2], [1, [2, 3]]),
        lambda: rows("x", {"a": [1, [2, 3]]}),
    ):
        with pytest.raises(DataError, match=said):
            make()


def test_one_of_anything_is_not_a_plural() -> None:
    one = Results(results=named(curve("a", [1])), about=provenance(depth=1, samples=1))
    assert str(one).endswith(": 1 block, 1 sample, 1 measurement")
    more = Results(results=named(curve("a", [1])), about=provenance(depth=2, samples=1200))
    assert str(more).endswith(": 2 blocks, 1,200 samples, 1 measurement")
