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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from everydepth.errors import DataError, SettingError
from everydepth.files import explained, read_json, write_bytes, write_text
from everydepth.results.build import as_array
from everydepth.results.earlier import converted
from everydepth.results.result import Better, Kind, Result
from everydepth.results.results import FORMAT, Results, class_of, described

FILE = "measured.json"
DEEPEST = 100_000  # blocks; a larger number can only be an attack
LARGEST = 512 * 2**20  # bytes of one file, unpacked
_MASK = "!mask"  # suffix of the stored mask of a masked array; cannot be part of an array's name
EARLIER = ("trace", "profile", "exits")
"""Names of the `<name>.json` files from before all results shared one format."""

# What reading a malformed file can raise.
BROKEN = (
    AttributeError,
    EOFError,
    KeyError,
    MemoryError,  # an array that says it is larger than any memory
    RuntimeError,  # recursion, and a zip file that seems encrypted or packed in an unknown way
    TypeError,
    ValueError,
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
    """Whether a folder holds results, of this version or an earlier one."""
    return (folder / FILE).is_file() or (folder / "trace.json").is_file()


def find(folder: Path) -> dict[str, Path]:
    """The folders of results directly inside a folder; a link to the outside is an error."""
    return {
        entry.name: entry
        for entry in sorted(folder.iterdir())
        if any(inside(folder, f"{entry.name}/{name}") for name in (FILE, "trace.json"))
    }


@explained("the results cannot be read", DataError)
def load(folder: Path) -> Results:
    """The results in a folder, as the class of their kind if its module was imported.

    The path may also be a file of an earlier version.
    """
    folder, given = (folder.parent, folder.stem) if folder.is_file() else (folder, None)
    try:
        if given is None and (folder / FILE).is_file():
            return _load(folder)
        for name in EARLIER if given is None else (given,):
            if inside(folder, f"{name}.json"):
                found = converted(name, read_object(folder, f"{name}.json"), folder)
                if found is not None:
                    return found
    except DataError:
        raise
    except (*BROKEN, SettingError) as error:
        raise DataError(
            f"the results in {folder} are incomplete ({type(error).__name__}: {error}); "
            "restore them from a copy, or measure again"
        ) from error
    raise DataError(
        f"no results in {str(folder)!r}; give a folder written by `Results.save`"
        + ("" if folder.is_dir() else " (there is no such folder)")
    )


def _load(folder: Path) -> Results:
    head = read_object(folder, FILE)
    check_format(folder, head.get("format"), FORMAT)
    kind = checked(head["kind"], str, "kind")
    cls = class_of(kind)
    results = read_results(folder, checked(head["arrays"], str, "arrays"), head["results"])
    about = checked(head["about"], dict, "about")
    check_counts(about)
    return cls(results=results, about=about, kind=kind)


def from_json(content: Any) -> Results:
    """The inverse of `Results.to_json`; null becomes undefined again."""
    try:
        head = checked(content, dict, "the content")
        if head.get("format") != FORMAT:
            raise DataError(
                f"results of format {head.get('format')!r:.40}, but this everydepth reads format "
                f"{FORMAT}; use the same version on both sides"
            )
        kind, about = checked(head["kind"], str, "kind"), checked(head["about"], dict, "about")
        check_counts(about)
        results: dict[str, Result] = {}
        for entry in checked(head["results"], list, "results"):
            arrays = checked(checked(entry, dict, "a result")["arrays"], dict, "arrays")
            stored = {f"{entry['name']}/{key}": as_array(value) for key, value in arrays.items()}
            found = _result(entry, stored)
            results[found.name] = found
        return class_of(kind)(results=results, about=about, kind=kind)
    except DataError:
        raise
    except (*BROKEN, SettingError) as error:
        raise DataError(
            f"these are not complete results ({type(error).__name__}: {error}); send what "
            "Results.to_json returns"
        ) from error


def check_format(folder: Path, found: Any, readable: int) -> None:
    if found != readable:
        raise DataError(
            f"{folder} holds results of format {found!r}, but this everydepth reads format "
            f"{readable}; read them with the everydepth that wrote them"
        )


def read_results(folder: Path, file: str, entries: Sequence[Any]) -> dict[str, Result]:
    """The results described by the entries of the JSON, with their arrays."""
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
        found = [_result(checked(entry, dict, "a result"), stored) for entry in entries]
    return {result.name: result for result in found}


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
        raise TypeError(f"{name!r:.40} is not a result")
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


def check_counts(about: Mapping[str, Any]) -> None:
    """Raise an error if a count is not one; a huge depth would make huge pages."""
    for name in ("depth", "samples"):
        number = about.get(name)
        if number is not None and (type(number) is not int or number < 0):
            raise ValueError(f"{name} is {number!r:.40}, not a count")
    if (about.get("depth") or 0) > DEEPEST:
        raise ValueError(f"depth is {about['depth']}, more than {DEEPEST}")


def checked(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{what} is {value!r:.40}, not {kind.__name__}")
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
