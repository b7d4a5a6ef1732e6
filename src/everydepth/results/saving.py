"""Results on disk: JSON, and one npz without pickles for the arrays.

Reading untrusted files is safe: only files with known names are read, none outside the folder, none
unpacked beyond a limit, and every type is checked.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import zipfile
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np

from everydepth.config import brief
from everydepth.errors import DataError, SettingError
from everydepth.files import MALFORMED_ARRAY, explained, read_json, write_bytes, write_text
from everydepth.results.build import as_array
from everydepth.results.result import Better, Kind, Result
from everydepth.results.results import FORMAT, Results, class_of, described, named

FILE = "measured.json"
DEEPEST = 100_000  # blocks; a larger number can only be an attack
COUNTS = ("depth", "samples")  # of any kind of results
LARGEST = 512 * 2**20  # bytes of one file, unpacked
_MASK = "!mask"  # suffix of the stored mask of a masked array; cannot be part of an array's name

# What reading a malformed file can raise.
BROKEN = (
    *MALFORMED_ARRAY,
    AttributeError,
    KeyError,
    RuntimeError,  # recursion, and a zip file that seems encrypted or packed in an unknown way
    TypeError,
    lzma.LZMAError,
    zipfile.BadZipFile,
    zlib.error,
)


@explained("the results cannot be saved", DataError)
def save(results: Results, folder: Path) -> Path:
    """Write the arrays, then the JSON that names their file: a killed save leaves the old pair."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, np.ndarray] = {}
    for name, result in results.results.items():
        for key, array in result.arrays.items():
            arrays[f"{name}/{key}"] = np.ma.getdata(array)
            if isinstance(array, np.ma.MaskedArray):
                arrays[f"{name}/{key}{_MASK}"] = np.ma.getmaskarray(array)
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)  # pyright: ignore[reportArgumentType]
    content = packed.getvalue()
    # The name depends on the content, so that the old pair stays valid until the JSON changes.
    file = f"measured-{hashlib.sha256(content).hexdigest()[:12]}.npz"
    head = {
        "format": FORMAT,
        "kind": results.kind,
        "arrays": file,
        "about": dict(results.about),
        "results": [{**described(r), "arrays": list(r.arrays)} for r in results.results.values()],
    }
    write_bytes(folder / file, content)
    write_text(folder / FILE, json.dumps(head, indent=1) + "\n")
    for old in folder.glob("measured-*.npz"):
        if old.name != file:
            old.unlink()
    return folder


def is_saved(folder: Path) -> bool:
    """Whether a folder holds results."""
    return (folder / FILE).is_file()


def find(folder: Path) -> dict[str, Path]:
    """The folders of results directly inside a folder; a link to the outside is an error."""
    return {
        entry.name: entry
        for entry in sorted(folder.iterdir())
        if inside(folder, f"{entry.name}/{FILE}")
    }


@explained("the results cannot be read", DataError)
def load(folder: Path) -> Results:
    """The results in a folder, as the class of their kind if its module was imported."""
    if not is_saved(folder):
        raise DataError(
            f"no results in {str(folder)!r}; give a folder written by `Results.save`"
            + ("" if folder.is_dir() else " (there is no such folder)")
        )
    with _complete(
        f"the results in {folder} are incomplete", "restore them from a copy, or measure again"
    ):
        head = read_object(folder, FILE)
        if head.get("format") != FORMAT:
            raise DataError(
                f"{folder} holds results of format {brief(head.get('format'))}, but this "
                f"everydepth reads format {FORMAT}; read them with the everydepth that wrote them"
            )
        file = checked(head["arrays"], str, "arrays")
        if Path(file).name != file or not inside(folder, file):
            raise DataError(
                f"{folder} has no {file[:80]!r}, which holds the arrays; copy the whole folder"
            )
        with zipfile.ZipFile(folder / file) as packed:
            size = sum(entry.file_size for entry in packed.infolist())
        if size > LARGEST:
            raise DataError(
                f"{folder / file} unpacks to {size / 2**20:.0f} MiB, but up to "
                f"{LARGEST / 2**20:.0f} MiB are read; save fewer measurements"
            )
        with np.load(folder / file, allow_pickle=False) as stored:
            return _results(head, lambda entry: stored)


def from_json(content: Any) -> Results:
    """The inverse of `Results.to_json`; null becomes undefined again."""
    with _complete("these are not complete results", "send what Results.to_json returns"):
        head = checked(content, dict, "the content")
        if head.get("format") != FORMAT:
            raise DataError(
                f"results of format {brief(head.get('format'))}, but this everydepth reads format "
                f"{FORMAT}; use the same version on both sides"
            )

        def arrays(entry: Mapping[str, Any]) -> dict[str, np.ndarray]:
            values = checked(entry["arrays"], dict, "arrays")
            return {f"{entry['name']}/{key}": as_array(value) for key, value in values.items()}

        return _results(head, arrays)


@contextmanager
def _complete(what: str, repair: str) -> Generator[None, None, None]:
    """Turn whatever a malformed file raises into one error."""
    try:
        yield
    except DataError:
        raise
    except (*BROKEN, SettingError) as error:
        raise DataError(f"{what} ({type(error).__name__}: {error}); {repair}") from error


def _results(
    head: Mapping[str, Any], arrays: Callable[[Mapping[str, Any]], Mapping[str, np.ndarray]]
) -> Results:
    """The results that a head describes. arrays: those of one entry, by `result/array`."""
    kind, about = checked(head["kind"], str, "kind"), checked(head["about"], dict, "about")
    _check_counts(about, (*COUNTS, *class_of(kind).counted))
    entries = [checked(e, dict, "a result") for e in checked(head["results"], list, "results")]
    found = named(*(_result(entry, arrays(entry)) for entry in entries))
    return class_of(kind)(results=found, about=about, kind=kind)


def _result(entry: Mapping[str, Any], stored: Mapping[str, np.ndarray]) -> Result:
    name = checked(entry["name"], str, "name")
    arrays: dict[str, np.ndarray] = {}
    for key in entry["arrays"]:
        place = f"{name}/{checked(key, str, 'array')}"
        data, mask = stored[place], f"{place}{_MASK}"
        arrays[key] = np.ma.masked_array(data, mask=stored[mask]) if mask in stored else data
    words = {
        key: checked(entry.get(key, ""), str, key)
        for key in ("axis", "title", "about", "unit", "section")
    }
    note, better = entry.get("note"), entry.get("better")
    if entry["kind"] not in get_args(Kind) or better not in (None, *get_args(Better)):
        raise TypeError(f"{brief(name)} is not a result")
    labels = checked(entry["labels"], dict, "labels")
    result = Result(
        name=name,
        kind=entry["kind"],
        series=tuple(entry["series"]),
        arrays=arrays,
        labels={key: checked(label, str, "label") for key, label in labels.items()},
        better=better,
        meta=checked(entry["meta"], dict, "meta"),
        note=None if note is None else checked(note, str, "note"),
        **{key: word for key, word in words.items() if word},
    )
    _check_depths(result)
    return result


def _check_depths(result: Result) -> None:
    depth = result.arrays.get("depth")
    if depth is not None and (
        depth.dtype.kind not in "iu" or not depth.size or depth.min() < 0 or depth.max() > DEEPEST
    ):
        raise ValueError(f"the depths of {result.name} are not depths")


def _check_counts(about: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raise an error if a count is not one; a huge depth would make huge pages."""
    for name in names:
        number = about.get(name)
        if number is not None and (type(number) is not int or number < 0):
            raise ValueError(f"{name} is {brief(number)}, not a count")
    if (about.get("depth") or 0) > DEEPEST:
        raise ValueError(f"depth is {about['depth']}, more than {DEEPEST}")


def checked(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{what} is {brief(value)}, not {kind.__name__}")
    return value


def inside(folder: Path, name: str) -> bool:
    """Whether the file exists; an error if it is a link to the outside, or too large."""
    file = folder / name
    if not file.is_file():
        return False
    real = file.resolve()
    if not real.is_relative_to(folder.resolve()):
        raise DataError(f"{file} leads out of {folder}, and only files inside it are read")
    if real.stat().st_size > LARGEST:
        raise DataError(
            f"{file} has {real.stat().st_size / 2**20:.0f} MiB, but up to "
            f"{LARGEST / 2**20:.0f} MiB are read; shorten it"
        )
    return True


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none."""
    if not inside(folder, name):
        return {}
    found = read_json(folder / name, DataError)
    return found if isinstance(found, dict) else {}
