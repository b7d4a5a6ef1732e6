"""Results are written whole or not at all, and reading files from anywhere cannot do harm."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.results import curve, every_kind, trace_of

from everydepth.config import plain
from everydepth.errors import DataError
from everydepth.results import Result, Results, named, rows, saving
from everydepth.results.results import restored
from everydepth.tracing import Trace

ACCURACY = curve("accuracy", [0.1, 0.5, 0.9])


class Other(Results, kind="test of saving"):
    """A kind of its own."""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return trace_of(ACCURACY, depth=2).save(tmp_path / "trace")


def head_of(folder: Path) -> Path:
    return next(folder.glob("*.json"))


def arrays_of(folder: Path) -> Path:
    return next(folder.glob("*.npz"))


def same(a: Results, b: Results) -> None:
    assert list(a) == list(b)
    for name in a:
        one, two = a.result(name), b.result(name)
        assert {k: v for k, v in vars(one).items() if k != "arrays"} == {
            k: v for k, v in vars(two).items() if k != "arrays"
        }
        assert list(one.arrays) == list(two.arrays)
        for key, array in one.arrays.items():
            assert array.dtype == two.arrays[key].dtype
            np.testing.assert_array_equal(np.ma.asarray(array), np.ma.asarray(two.arrays[key]))


def test_every_kind_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    masked = np.ma.masked_array([1.0, 2.0], mask=[False, True])
    half = Result(
        name="half",
        kind="curve",
        series=("y",),
        axis="step",
        arrays={"step": np.arange(2), "y": masked},
        title="Half",
        about="Half of it is masked.",
        unit="ms",
        better="lower",
        section="cost",
        meta={"a": [1, None]},
        note="look twice",
    )
    words = rows("words", {"where": ["attic", "é"], "count": [1, 2]})
    made = Other(results={**every_kind(), **named(half, words)}, about={"model": "M", "depth": 4})
    loaded = Results.load(made.save(tmp_path / "all"))
    assert isinstance(loaded, Other)
    assert loaded.about == made.about
    assert np.ma.is_masked(loaded["half"])
    same(made, loaded)


def test_a_class_loads_its_own_kind_only(tmp_path: Path) -> None:
    other = Other(results=named(ACCURACY)).save(tmp_path / "other")
    assert Other.load(other)["accuracy"].shape == (3,)
    with pytest.raises(DataError, match="holds a test of saving, not a trace; load it with Res"):
        Trace.load(other)


def test_results_load_and_show_without_the_module_that_made_them(tmp_path: Path) -> None:
    words = rows("words", {"where": ["attic"], "count": [1]})
    folder = trace_of(*every_kind().values(), words).save(tmp_path / "trace")
    script = f"""
import sys
from everydepth.results import Results
found = Results.load({str(folder)!r})
assert not any(name.startswith("everydepth.tracing") for name in sys.modules)
assert "torch" not in sys.modules
assert type(found) is Results and found.kind == "trace" and found.model == "Sample"
assert len(str(found.table()).splitlines()) == 1 + 1 + 5 + 2
for name in found:
    assert found.table(name).markdown() and found.table(name)._repr_html_()
found.plot("cos"), found.figure(), found.figure(backend="plotly")
found.save({str(tmp_path / "again")!r})
print(found.kind, found["accuracy"][-1])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trace 0.9\n"
    again = Trace.load(tmp_path / "again")  # the kind was kept
    same(again, Trace.load(folder))


def test_a_save_that_is_cut_off_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace_of(ACCURACY).save(tmp_path)

    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_text", cut_off)
        with pytest.raises(KeyboardInterrupt):
            trace_of(curve("loss", [1.0])).save(tmp_path)
    assert list(Trace.load(tmp_path)) == ["accuracy"]
    trace_of(curve("loss", [1.0])).save(tmp_path)
    assert list(Trace.load(tmp_path)) == ["loss"]
    assert len(list(tmp_path.iterdir())) == 2


def test_results_travel_between_processes() -> None:
    made = trace_of(ACCURACY)
    again = pickle.loads(pickle.dumps(made))  # noqa: S301 - what pickling is for
    assert again.about == made.about
    same(made, again)


@dataclass(frozen=True)
class Inner:
    values: tuple[float, ...]


@dataclass(frozen=True)
class Outer:
    name: str
    pairs: tuple[tuple[float, float], ...]
    one: Inner | None
    several: tuple[Inner, ...]
    by_name: dict[str, float]


def test_what_is_restored_from_json_is_what_was_written() -> None:
    inner = Inner((1.0, 2.5))
    for one in (inner, None):
        made = Outer("a", ((0.5, 1.0), (2.0, 3.0)), one, (inner, Inner(())), {"b": 0.25})
        content = json.loads(json.dumps(plain(made)))
        assert restored(Outer, content) == made
        assert restored(tuple[Outer, ...], [content, content]) == (made, made)
    assert restored(Outer, {**content, "derived": True}) == made  # other entries are left out


def test_json_has_null_for_what_is_undefined() -> None:
    values = np.ma.masked_array([1.0, np.inf, np.nan, 4.0], mask=[0, 0, 0, 1])
    arrays = {"depth": np.arange(4), "v": values}
    made = trace_of(Result(name="loss", kind="curve", series=("v",), arrays=arrays))
    content = json.loads(json.dumps(made.to_json(), allow_nan=False))
    assert content["results"][0]["arrays"]["v"] == [1.0, None, None, None]
    assert content["about"]["model"] == "Sample"
    assert content["kind"] == "trace"


def test_the_arrays_are_not_read_through_a_link_that_leads_out(saved: Path) -> None:
    secret = saved.parent / "secret"
    arrays_of(saved).rename(secret)
    name = json.loads(head_of(saved).read_text())["arrays"]
    (saved / name).symlink_to(secret)
    with pytest.raises(DataError, match=r"leads out of .*only files inside it are read"):
        Results.load(saved)


def test_the_arrays_are_not_read_from_another_folder(tmp_path: Path) -> None:
    one, two = (trace_of(ACCURACY).save(tmp_path / name) for name in ("one", "two"))
    content = json.loads(head_of(one).read_text())
    content["arrays"] = f"../two/{arrays_of(two).name}"
    head_of(one).write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"has no '\.\./two/.*', which holds the arrays"):
        Results.load(one)


def test_an_array_of_pickles_is_refused(saved: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (pytest.fail, ("a pickle was run",))

    objects = np.array([Harmful()], dtype=object)
    np.savez(
        arrays_of(saved),
        allow_pickle=True,
        **{"accuracy/depth": np.arange(3), "accuracy/value": objects},
    )
    with pytest.raises(DataError, match=r"the results in .* are incomplete"):
        Results.load(saved)


def test_a_file_that_unpacks_beyond_the_limit_is_refused_before_it_is_unpacked(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = arrays_of(saved).stat().st_size + head_of(saved).stat().st_size
    np.savez_compressed(arrays_of(saved), zeros=np.zeros(10 * size))
    monkeypatch.setattr(saving, "LARGEST", 5 * size)
    with pytest.raises(DataError, match=r"npz unpacks to .* MiB, but up to"):
        Results.load(saved)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        '{"version": 1, "format": 1}',
        "[" * 100_000,
        '{"format": 1, "results": [3]}',
        "\0",
    ],
)
def test_a_broken_file_is_a_clear_error(saved: Path, text: str) -> None:
    head_of(saved).write_text(text)
    with pytest.raises(DataError, match=r"results|JSON"):
        Results.load(saved)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["depth"], "<script>"),
        (["depth"], 10**12),
        (["samples"], -1),
        (["results", 0, "kind"], "<script>"),
        (["results", 0, "note"], 3),
        (["results", 0, "labels"], {"depth": 3}),
        (["results", 0, "series"], ["nothing"]),
        (["results", 0, "meta"], 3),
        (["results", 0], None),
    ],
)
def test_a_field_of_another_type_is_refused(saved: Path, path: list[Any], value: object) -> None:
    content = json.loads(head_of(saved).read_text())
    inner = content if path[0] in content else content["about"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    head_of(saved).write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"the results in .* are incomplete"):
        Results.load(saved)


@pytest.mark.parametrize("depth", [["<b>", "1", "2"], [0, 1, 10**9], [-1, 0, 1], [0.5, 1, 2]])
def test_depths_that_are_no_depths_are_refused(saved: Path, depth: list[Any]) -> None:
    arrays = {"accuracy/depth": np.array(depth), "accuracy/value": np.zeros(3)}
    np.savez(arrays_of(saved), allow_pickle=False, **arrays)
    with pytest.raises(DataError, match="the depths of accuracy are not depths"):
        Results.load(saved)


def test_a_folder_without_its_arrays_is_an_error(saved: Path) -> None:
    arrays_of(saved).unlink()
    with pytest.raises(DataError, match=r"has no '.*\.npz', which holds the arrays; copy the"):
        Results.load(saved)


@pytest.mark.parametrize("method", [1, 14, 97])
def test_arrays_packed_in_another_way_are_an_error_that_says_so(
    tmp_path: Path, method: int
) -> None:
    """One flipped bit in a zip file names another compression."""
    folder = trace_of(ACCURACY, depth=2).save(tmp_path / "trace")
    content = bytearray(arrays_of(folder).read_bytes())
    for magic, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        start = content.find(magic)
        while start >= 0:
            content[start + place] = method
            start = content.find(magic, start + 1)
    arrays_of(folder).write_bytes(content)
    with pytest.raises(DataError, match=r"the results in .* are incomplete"):
        Results.load(folder)


def test_an_array_that_claims_more_than_all_memory_is_refused(tmp_path: Path) -> None:
    folder = trace_of(ACCURACY, depth=2).save(tmp_path / "trace")
    with np.load(arrays_of(folder)) as stored:
        names = list(stored)
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,), }"
    npy = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with zipfile.ZipFile(arrays_of(folder), "w") as packed:
        for name in names:
            packed.writestr(f"{name}.npy", npy)
    with pytest.raises(DataError, match=r"the results in .* are incomplete"):
        Results.load(folder)


@pytest.mark.parametrize("count", ["rows", "passes"])
def test_a_count_that_is_none_is_refused(tmp_path: Path, count: str) -> None:
    file = trace_of(ACCURACY).save(tmp_path / "trace") / "measured.json"
    saved = json.loads(file.read_text())
    saved["about"][count] = "../x"
    file.write_text(json.dumps(saved))
    with pytest.raises(DataError, match=f"{count} is '../x', not a count"):
        Results.load(file.parent)
