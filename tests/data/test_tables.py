from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest

from everydepth.data import load_columns, load_table, load_text
from everydepth.errors import DataError

PACKINGS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def write(folder: Path, name: str, text: str, packing: str = "", encoding: str = "utf-8") -> Path:
    path = folder / (name + packing)
    path.write_bytes(PACKINGS[packing](text.encode(encoding)))
    return path


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_tsv_with_a_header_is_read_by_name_and_keeps_its_quotes(tmp_path: Path, packing: str):
    path = write(tmp_path, "a.tsv", 'sentence\tlabel\n"half quoted\t1\nplain\t0\n', packing)
    data = load_table(path, text="sentence", label="label")
    assert data.texts == ('"half quoted', "plain")
    assert data.labels is not None
    assert data.labels.tolist() == [1, 0]
    assert data.classes == ("0", "1")


def test_a_tsv_without_a_header_is_read_by_position(tmp_path: Path):
    path = write(tmp_path, "a.tsv", "gj04\t1\t\tOne.\ngj04\t0\t*\tTwo.")
    data = load_table(path, text=3, label=1, header=False, classes=("bad", "good"))
    assert data.texts == ("One.", "Two.")
    assert data.labels is not None
    assert data.labels.tolist() == [1, 0]
    assert data.classes == ("bad", "good")


def test_given_column_names_recognize_a_header_or_its_absence(tmp_path: Path):
    names = ("index", "text", "label")
    bare = write(tmp_path, "bare.tsv", "0\thello\tyes\n")
    full = write(tmp_path, "full.tsv", "index\ttext\tlabel\n0\thello\tyes\n")
    short = write(tmp_path, "short.tsv", "index\ttext\n0\thello\n")
    for path in (bare, full, short):
        assert load_table(path, text="text", columns=names).texts == ("hello",)


@pytest.mark.parametrize("mark", ["\ufeff", "\u00ef\u00bb\u00bf"])
def test_a_byte_order_mark_is_no_part_of_the_first_name_even_encoded_twice(
    tmp_path: Path, mark: str
):
    path = write(tmp_path, "a.txt", f"{mark}Quality\t#1 String\r\n1\tx\r\n")
    assert load_columns(path).columns == {"Quality": ("1",), "#1 String": ("x",)}


def test_csv_cells_may_be_quoted_and_hold_line_ends(tmp_path: Path):
    path = write(tmp_path, "a.csv", 'Model Size,note\n1e9,"a, ""b""\nc"\n')
    table = load_columns(path)
    assert table["note"] == ('a, "b"\nc',)
    assert table.numbers("Model Size").tolist() == [1e9]


def test_a_semicolon_in_the_text_is_not_the_one_before_the_label(tmp_path: Path):
    path = write(tmp_path, "a.txt", "text;label\nwell; yes;joy\nno;fear\n")
    data = load_table(path, text="text", label="label", classes=("joy", "fear"))
    assert data.texts == ("well; yes", "no")


def test_a_line_ends_at_a_newline_only(tmp_path: Path):
    path = write(tmp_path, "a.tsv", "text\tlabel\none\u2028more\x85\t1\n")
    assert load_table(path, text="text").texts == ("one\u2028more\x85",)


RECORDS = [{"q": "one", "in": "", "n": 1, "a": "x"}, {"q": "two", "in": "z", "n": 0, "a": None}]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_json_records_round_trip_and_text_columns_join_as_lines(
    tmp_path: Path, name: str, packing: str
):
    joined = "\n".join(map(json.dumps, RECORDS)) + "\n"
    text = joined if name.endswith("jsonl") else json.dumps(RECORDS)
    path = write(tmp_path, name, text, packing)
    data = load_table(path, text=("q", "in"), pair="a", label="n")
    assert data.texts == ("one", "two\nz")
    assert data.pairs == ("x", "")
    assert data.labels is not None
    assert data.labels.tolist() == [1, 0]


def test_numeric_labels_sort_as_numbers_and_names_as_names(tmp_path: Path):
    numbers = write(tmp_path, "n.tsv", "t\tl\na\t10\nb\t9\nc\t-1\n")
    assert load_table(numbers, text="t", label="l").classes == ("-1", "9", "10")
    names = write(tmp_path, "w.tsv", "t\tl\na\tyes\nb\tno\n")
    assert load_table(names, text="t", label="l").classes == ("no", "yes")


def test_a_label_is_its_value_however_it_is_written(tmp_path: Path):
    cells = ["1", " 1", "01", "1.0", "10", "9", "+9", "-2.5"]
    path = write(tmp_path, "n.tsv", "t\tl\n" + "".join(f"x\t{cell}\n" for cell in cells))
    found = load_table(path, text="t", label="l")
    assert found.classes == ("-2.5", "1", "9", "10")
    assert found.labels is not None
    assert found.labels.tolist() == [1, 1, 1, 1, 3, 2, 2, 0]
    names = write(tmp_path, "w.tsv", "t\tl\na\tyes \nb\t no\nc\tyes\n")
    assert load_table(names, text="t", label="l").classes == ("no", "yes")
    mixed = write(tmp_path, "m.tsv", "t\tl\na\t01\nb\tone\n")  # not all are numbers
    assert load_table(mixed, text="t", label="l").classes == ("01", "one")
    placed = load_table(path, text="t", label="l", classes=(*"abcdefghijk", "-2.5"))
    assert placed.labels is not None
    assert placed.labels.tolist() == [1, 1, 1, 1, 10, 9, 9, 11]


@pytest.mark.parametrize("cell", ["", "  ", "nan", "NaN", "null", "NULL"])
def test_a_missing_label_is_no_class(tmp_path: Path, cell: str):
    path = write(tmp_path, "a.tsv", f"t\tl\na\t1\nb\t{cell}\n")
    for classes in (None, ("no", "yes")):
        with pytest.raises(DataError, match=r"the label of row 1 of .*a.tsv is missing \('.*'\);"):
            load_table(path, text="t", label="l", classes=classes)
    if cell.strip():
        named = load_table(path, text="t", label="l", classes=("no", "yes", cell))
        assert named.labels is not None
        assert named.labels.tolist() == [1, 2]


def test_a_missing_label_of_json_is_no_class(tmp_path: Path):
    text = '[{"t": "a", "l": 1}, {"t": "b", "l": null}, {"t": "c", "l": NaN}]'
    path = write(tmp_path, "a.json", text)
    with pytest.raises(DataError, match=r"the label of row 1 and of 1 more of .* is missing"):
        load_table(path, text="t", label="l")


@pytest.mark.parametrize("packing", PACKINGS)
def test_plain_text_round_trips(tmp_path: Path, packing: str):
    path = write(tmp_path, "a.txt", "To be,\nor not \u2013 to be.\n", packing)
    assert load_text(path).text == "To be,\nor not \u2013 to be.\n"


def test_another_encoding_is_named_and_can_be_given(tmp_path: Path):
    path = write(tmp_path, "a.txt", "caf\u00e9", encoding="latin-1")
    with pytest.raises(DataError, match=r"a.txt: byte 3 is not utf-8; give the file's encoding"):
        load_text(path)
    assert load_text(path, encoding="latin-1").text == "caf\u00e9"


BAD = [
    ("a.tsv", "t\tl\none\t1\ntwo\n", r"a.tsv line 3 has 1 cells, but 2 were expected \('t', 'l'\)"),
    ("a.tsv", "", r"a.tsv is empty, but rows were expected"),
    ("a.tsv", "t\tl\n", r"a.tsv has a header but no rows"),
    ("a.tsv", "t\tt\n1\t2\n", r"has two columns with the same name in 't', 't'; give header=False"),
    (
        "a.tsv",
        "x\ty\n1\t2\n",
        r"column 't', but .*a.tsv has 'x', 'y'; use one of these or an index from 0 to 1",
    ),
    ("a.csv", 't,l\n"open', r"a.csv line \d is not csv"),
    ("a.json", '[{"t": "x"}, {"t"', r"a.json is not JSON .*cut short"),
    ("a.json", '{"t": "x"}', r"a.json holds a dict, but a list of objects was expected"),
    ("a.jsonl", '{"t": "x"}\n{"t": ', r"a.jsonl line 2 is not JSON .*cut short"),
    ("a.jsonl", '{"t": "x"}\n{"u": 1}', r"a.jsonl record 1 is .*, but an object with 't' was"),
    ("a.jsonl", "3", r"a.jsonl record 0 is '3', but an object with columns was expected"),
    ("a.txt", "just words\n", r"a.txt has neither a tab nor a semicolon in its first line"),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD)
def test_a_broken_table_is_named_with_what_was_expected(
    tmp_path: Path, name: str, text: str, message: str
):
    with pytest.raises(DataError, match=message):
        load_table(write(tmp_path, name, text), text="t")


def test_a_label_outside_the_classes_is_refused(tmp_path: Path):
    path = write(tmp_path, "a.tsv", "t\tl\none\tmaybe\n")
    with pytest.raises(DataError, match=r"label 'maybe' in row 0 of .*the classes are 'no', 'yes'"):
        load_table(path, text="t", label="l", classes=("no", "yes"))


def test_a_missing_file_is_answered_with_what_is_there(tmp_path: Path):
    write(tmp_path, "train.txt", "x")
    with pytest.raises(DataError, match=r"test.txt cannot be read .* holds train.txt"):
        load_text(tmp_path / "test.txt")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"empty.txt is empty"):
        load_text(tmp_path / "empty.txt")


def test_a_truncated_xz_is_named(tmp_path: Path):
    packed = lzma.compress(b"t\tl\n" + b"some text\t1\n" * 100)
    (tmp_path / "a.tsv.xz").write_bytes(packed[:-10])
    with pytest.raises(DataError, match=r"a.tsv.xz is truncated or corrupt"):
        load_table(tmp_path / "a.tsv.xz", text="t")
