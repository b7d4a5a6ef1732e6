"""Tables and texts from a local file: tsv, csv, `text;label` lines, json, jsonl, plain text.

We do not use `datasets` here because it guesses column types: text that looks like a date becomes a
date, "01" becomes 1, and "null" and "NA" vanish.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor

from everydepth.config import checked
from everydepth.data.reading import lines, read_text, unpacked_name
from everydepth.data.sets import Corpus, Table, Texts
from everydepth.errors import DataError
from everydepth.files import explained, parse_json

_DELIMITERS = {".tsv": "\t", ".csv": ","}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,2})?")
_MISSING = ("", "nan", "null")
TABLE_SUFFIXES = (*_DELIMITERS, ".jsonl", ".json")


@checked
@explained("the file cannot be read", DataError)
def load_text(path: str | Path, *, encoding: str = "utf-8") -> Corpus:
    """A plain text file, packed or not, as one corpus.

    >>> from pathlib import Path
    >>> from everydepth.data import load_text
    >>> _ = Path("story.txt").write_text("Once upon a time")
    >>> load_text("story.txt").text
    'Once upon a time'
    """
    text = read_text(Path(path), encoding)
    if not text:
        raise DataError(f"{path} is empty; download it again")
    return Corpus(text)


@checked
@explained("the file cannot be read", DataError)
def load_columns(
    path: str | Path,
    *,
    columns: Sequence[str] | None = None,
    header: bool = True,
    delimiter: str | None = None,
    encoding: str = "utf-8",
) -> Table:
    """The columns of a file, as text.

    The first row names the columns. With `header=False` they are named "0", "1", ...; with
    `columns=` they have these names, and a first row that consists of them counts as a header. The
    suffix determines the format; in a `.txt`, cells are separated by tabs, or else semicolons.

    >>> from pathlib import Path
    >>> from everydepth.data import load_columns
    >>> _ = Path("points.csv").write_text("size,loss\\n1,3.0\\n2,2.5\\n")
    >>> load_columns("points.csv").numbers("loss").tolist()
    [3.0, 2.5]
    """
    path = Path(path)
    text = read_text(path, encoding)
    suffix = Path(unpacked_name(path)).suffix
    if not text.strip():
        raise DataError(f"{path} is empty, but rows were expected; download it again")
    if suffix in (".json", ".jsonl"):
        return _from_records(_records(path, text), path)
    rows = _cells(path, text, delimiter or _DELIMITERS.get(suffix) or _sniffed(path, text))
    _, first = rows[0]
    if columns is not None:
        is_header = {cell.strip() for cell in first} <= set(columns)
        names = [cell.strip() for cell in first] if is_header else list(columns)
    else:
        is_header = header
        names = [c.strip() for c in first] if header else [str(i) for i in range(len(first))]
    if len(set(names)) < len(names):
        raise DataError(
            f"{path} has two columns with the same name in {', '.join(map(repr, names))}; "
            "give header=False or columns="
        )
    return _from_rows(path, names, rows[1:] if is_header else rows)


@checked
@explained("the file cannot be read", DataError)
def load_table(
    path: str | Path,
    *,
    text: str | int | Sequence[str],
    pair: str | int | None = None,
    label: str | int | None = None,
    classes: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    header: bool = True,
    delimiter: str | None = None,
    encoding: str = "utf-8",
) -> Texts:
    """The texts of a table, by column name or index; several text columns are joined as lines.

    Labels are class names or indices into `classes`, which default to the sorted labels of this
    file, in numeric order if they are numbers. To read several files consistently, pass the classes
    of the first to the others. A row without a label (empty, nan, null) is an error.

    >>> from pathlib import Path
    >>> from everydepth.data import load_table
    >>> _ = Path("reviews.csv").write_text("text,label\\ngood,1\\nbad,0\\n")
    >>> load_table("reviews.csv", text="text", label="label").labels.tolist()
    [1, 0]
    """
    table = load_columns(
        path, columns=columns, header=header, delimiter=delimiter, encoding=encoding
    )
    return table_texts(table, text=text, pair=pair, label=label, classes=classes, source=str(path))


def table_texts(
    table: Table,
    *,
    text: str | int | Sequence[str],
    pair: str | int | None,
    label: str | int | None,
    classes: Sequence[str] | None,
    source: str,
) -> Texts:
    """Texts from the columns of a table."""
    parts = [text] if isinstance(text, str | int) else list(text)
    cells = [_column(table, part, source) for part in parts]
    texts = tuple("\n".join(filter(None, row)) for row in zip(*cells, strict=True))
    pairs = None if pair is None else _column(table, pair, source)
    if label is None:
        return Texts(texts, pairs)
    labels, names = encode_labels(_column(table, label, source), classes, source)
    return Texts(texts, pairs, labels, names)


def encode_labels(
    cells: Sequence[str], classes: Sequence[str] | None, source: str
) -> tuple[Int[Tensor, " rows"], tuple[str, ...]]:
    """Class numbers and class names of labels given as text.

    Whitespace around a label is ignored. If all labels are numbers, equal ones are one class
    however they are written, and classes are in numeric order.
    """
    found: list[Any] = [cell.strip() for cell in cells]
    if classes is None:
        _check_labeled(found, source)
        if all(map(_NUMBER.fullmatch, found)):
            found = [_number(cell) for cell in found]
        order = sorted(set(found))
        names, place = tuple(map(str, order)), {value: i for i, value in enumerate(order)}
        return torch.tensor([place[value] for value in found], dtype=torch.long), names
    names = tuple(classes)
    place = {str(number): number for number in range(len(names))}
    place |= {name: number for number, name in enumerate(names)}
    for row, cell in enumerate(found):
        if cell not in place and _NUMBER.fullmatch(cell):
            cell = found[row] = str(_number(cell))
        if cell not in place:
            _check_labeled(found[row : row + 1], source, row)
            raise DataError(
                f"label {cell!r} in row {row} of {source}, but the classes are "
                f"{', '.join(map(repr, names))}; correct the file or classes="
            )
    return torch.tensor([place[cell] for cell in found], dtype=torch.long), names


def _check_labeled(cells: Sequence[str], source: str, first: int = 0) -> None:
    missing = [first + row for row, cell in enumerate(cells) if cell.lower() in _MISSING]
    if missing:
        more = f" and of {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(
            f"the label of row {missing[0]}{more} of {source} is missing "
            f"({cells[missing[0] - first]!r}); remove the row, write its class, or name the class "
            "in classes="
        )


def _number(cell: str) -> int | float:
    value = int(cell) if cell.lstrip("+-").isdecimal() else float(cell)
    return int(value) if value == int(value) else value


def _column(table: Table, which: str | int, source: str) -> tuple[str, ...]:
    names = list(table.columns)
    if isinstance(which, int) and 0 <= which < len(names):
        return table.columns[names[which]]
    if which in table.columns:
        return table.columns[cast(str, which)]
    raise DataError(
        f"column {which!r}, but {source} has {', '.join(map(repr, names))}; use one of these or "
        f"an index from 0 to {len(names) - 1}"
    )


def _sniffed(path: Path, text: str) -> str:
    first = text.split("\n", 1)[0]
    for delimiter in ("\t", ";"):
        if delimiter in first:
            return delimiter
    raise DataError(
        f"{path} has neither a tab nor a semicolon in its first line; expected tsv or text;label "
        "lines, so give delimiter= or read it with load_text"
    )


def _cells(path: Path, text: str, delimiter: str) -> list[tuple[int, list[str]]]:
    """Rows with their line numbers. Quotes are special only in csv: in a tsv they are text."""
    if delimiter == ",":
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        try:
            return [(reader.line_num, row) for row in reader if row]
        except csv.Error as error:
            raise DataError(
                f"{path} line {reader.line_num} is not csv ({error}); download it again or give "
                "delimiter="
            ) from error
    numbered = [(number, line) for number, line in enumerate(lines(text), 1) if line]
    # The label comes last, so any extra semicolons belong to the text.
    most = numbered[0][1].count(delimiter) if delimiter == ";" else -1
    return [(number, line.rsplit(delimiter, most)) for number, line in numbered]


def _from_rows(path: Path, names: list[str], rows: list[tuple[int, list[str]]]) -> Table:
    for number, row in rows:
        if len(row) != len(names):
            raise DataError(
                f"{path} line {number} has {len(row)} cells, but {len(names)} were expected "
                f"({', '.join(map(repr, names))}); the file is truncated, or give delimiter= or "
                "columns="
            )
    if not rows:
        raise DataError(f"{path} has a header but no rows; download it again")
    cells = zip(*(row for _, row in rows), strict=True)
    return Table(dict(zip(names, cells, strict=True)))


def _records(path: Path, text: str) -> list[Any]:
    """The list in a json file, or the lines of a jsonl file."""
    lined = Path(unpacked_name(path)).suffix == ".jsonl"
    found: list[Any] = []
    for number, part in enumerate(lines(text) if lined else [text], 1):
        where = f"{path}{f' line {number}' if lined else ''}"
        found += [parse_json(part, where, DataError)] if part.strip() else []
    if lined:
        return found
    if not isinstance(found[0], list) or not found[0]:
        raise DataError(
            f"{path} holds a {type(found[0]).__name__}, but a list of objects was expected; "
            "convert it, one object per row"
        )
    return cast(list[Any], found[0])


def _from_records(records: list[Any], path: Path) -> Table:
    names = list(records[0]) if isinstance(records[0], dict) else []
    for row, record in enumerate(records):
        if not isinstance(record, dict) or not set(names) <= record.keys() or not names:
            raise DataError(
                f"{path} record {row} is {str(record)[:60]!r}, but an object with "
                f"{', '.join(map(repr, names)) or 'columns'} was expected; correct the file"
            )
    return Table({name: tuple(_cell(record[name]) for record in records) for name in names})


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
