"""`load`: data by name, by path, or from the Hugging Face Hub."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, overload

from everydepth.config import checked
from everydepth.data.archives import load_newsgroups, load_tweeteval
from everydepth.data.digits import load_digits
from everydepth.data.hub import is_saved, load_files, load_hub
from everydepth.data.images import has_images, load_images
from everydepth.data.reading import find_file, listing, pick_split, unpacked_name
from everydepth.data.sets import Corpus, Data, Images, Points, Table, Texts
from everydepth.data.surfaces import SURFACES, surface_data
from everydepth.data.tables import TABLE_SUFFIXES, load_columns, load_table, load_text
from everydepth.environment import DATA_VARIABLE
from everydepth.errors import DataError
from everydepth.files import explained

FILE_SUFFIXES = (*TABLE_SUFFIXES, ".txt", ".parquet")
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")

Reader = Callable[..., Data]
"""Called with the dataset's folder, the split and options."""

D = TypeVar("D", Images, Points, Texts, Corpus, Table)


def _files(name: str, files: Mapping[str, str], read: Reader, **fixed: Any) -> Reader:
    """A dataset with one file per split."""

    def reader(folder: Path, split: str, **options: Any) -> Data:
        return read(find_file(folder, pick_split(name, split, files)), **fixed | options)

    return reader


def _images(classes: str) -> Reader:
    def reader(folder: Path, split: str, **options: Any) -> Data:
        return load_images(folder, split=split, classes=classes.split(", "), **options)

    return reader


def _archive(file: str, read: Reader) -> Reader:
    def reader(folder: Path, split: str, **options: Any) -> Data:
        return read(find_file(folder, file), split, **options)

    return reader


def _rte(folder: Path, split: str, **options: Any) -> Data:
    """`valid` is cut from GLUE's train, `dev` is GLUE's labeled dev set, `test` has no labels."""
    files = {name: f"{name}.tsv" for name in ("train", "dev", "test")} | {"valid": "val.tsv"}
    fixed: dict[str, Any] = {
        # The file of the valid split came without a header.
        "columns": ("index", "sentence1", "sentence2", "label"),
        "text": "sentence1",
        "pair": "sentence2",
        "label": None if split == "test" else "label",
        "classes": ("entailment", "not_entailment"),
    }
    return _files("rte", files, load_table, **fixed)(folder, split, **options)


FASHION = "t-shirt, trouser, pullover, dress, coat, sandal, shirt, sneaker, bag, ankle boot"
CIFAR10 = "airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck"

CATALOG: Mapping[str, Reader] = MappingProxyType(
    {
        "fashion-mnist": _images(FASHION),
        "cifar10": _images(CIFAR10),
        "sst2": _files(
            "sst2",
            {"train": "train.tsv", "valid": "dev.tsv", "test": "test.tsv"},
            load_table,
            text="sentence",
            label="label",
            classes=("negative", "positive"),
        ),
        # The test set here is the out-of-domain dev set: the official one has no labels.
        "cola": _files(
            "cola",
            {
                "train": "in_domain_train.tsv",
                "valid": "in_domain_dev.tsv",
                "test": "out_of_domain_dev.tsv",
            },
            load_table,
            columns=("source", "label", "mark", "sentence"),
            text="sentence",
            label="label",
            classes=("unacceptable", "acceptable"),
        ),
        "rte": _rte,
        "mrpc": _files(
            "mrpc",
            {"train": "msr_paraphrase_train.txt", "test": "msr_paraphrase_test.txt"},
            load_table,
            text="#1 String",
            pair="#2 String",
            label="Quality",
            classes=("not_equivalent", "equivalent"),
        ),
        "emotion": _files(
            "emotion",
            {"train": "train.txt", "valid": "val.txt", "test": "test.txt"},
            load_table,
            delimiter=";",
            text="text",
            label="label_name",
            classes=("sadness", "joy", "love", "anger", "fear", "surprise"),
        ),
        "20newsgroups": _archive("20news-bydate.tar", load_newsgroups),
        "tweeteval": _archive("tweeteval_datasets.tar", load_tweeteval),
        "gsm8k": _files(
            "gsm8k",
            {"train": "train.jsonl", "test": "test.jsonl"},
            load_table,
            text="question",
            pair="answer",
        ),
        "alpaca-5000": _files(
            "alpaca-5000",
            {"train": "alpaca_5000.json"},
            load_table,
            text=("instruction", "input"),
            pair="output",
        ),
        "wikitext-2": _files(
            "wikitext-2",
            {"train": "train.txt", "valid": "valid.txt", "test": "test.txt"},
            load_text,
        ),
        "tinyshakespeare": _files("tinyshakespeare", {"train": "input.txt"}, load_text),
        "kjv-bible": _files("kjv-bible", {"train": "kjv.txt"}, load_text),
        "chinchilla": _files("chinchilla", {"train": "svg_extracted_data.csv"}, load_columns),
    }
)
"""Datasets, each in a folder of its name under a root."""


@checked
def data_names() -> tuple[str, ...]:
    """Every name `load` knows without a network.

    >>> from everydepth.data import data_names
    >>> "digits" in data_names(), "fashion-mnist" in data_names()
    (True, True)
    """
    return ("digits", *(f"surface:{name}" for name in SURFACES), *CATALOG)


@overload
def load(
    name: str | Path,
    split: str = "train",
    *,
    kind: type[D],
    root: str | Path | None = None,
    **options: Any,
) -> D: ...
@overload
def load(
    name: str | Path,
    split: str = "train",
    *,
    kind: None = None,
    root: str | Path | None = None,
    **options: Any,
) -> Data: ...
@checked
@explained("the data cannot be read", DataError)
def load(
    name: str | Path,
    split: str = "train",
    *,
    kind: type[Any] | None = None,
    root: str | Path | None = None,
    **options: Any,
) -> Any:
    """Load a dataset by name, by path, or from the Hugging Face Hub.

    name: one of `data_names()`, the path of a file (txt, tsv, csv, json, jsonl, parquet) or folder
        (one such file per split, a folder of images per class, IDX or CIFAR binaries, what
        `save_to_disk` of the package `datasets` wrote), or
        `owner/name` on the Hub (`hf:name` if it has no owner).
    root: the folder that holds named datasets; by default the environment variable
        EVERYDEPTH_DATA.
    kind: the type to expect, such as `Images`.
    options: passed to the reader: `seed` for digits and surfaces, `task` for tweeteval and the
        Hub, `text`, `pair`, `label`, ... for a table (see `load_table`).

    >>> from everydepth.data import load
    >>> len(load("digits", "test"))
    359
    """
    data = _load(name, split, root, options)
    if kind is not None and not isinstance(data, kind):
        raise DataError(
            f"{str(name)!r} holds {type(data).__name__}, but kind={kind.__name__} was requested; "
            f"use kind={type(data).__name__} or other options"
        )
    return data


def _load(
    name: str | Path, split: str, root: str | Path | None, options: Mapping[str, Any]
) -> Data:
    known = str(name)
    if known == "digits":
        return load_digits(split, **options)
    if known.startswith("surface:"):
        train, test = surface_data(known.removeprefix("surface:"), **options)
        return pick_split(known, split, {"train": train, "test": test})
    if known in CATALOG:
        return CATALOG[known](_folder(known, root), split, **options)
    if Path(name).exists():
        if not (Path(name).is_dir() or Path(name).is_file()):  # a pipe would be waited for
            raise DataError(f"{known!r} is no regular file; save what it gives as one")
        return _from_path(Path(name), split, options)
    if known.startswith("hf:") or (isinstance(name, str) and known.count("/") == 1):
        return load_hub(known.removeprefix("hf:"), split=split, **options)
    raise DataError(_unknown(known))


def has_columns(name: str) -> bool:
    """Whether `load` takes `text`, `pair` and `label` for this data whatever else it is given."""
    path = Path(name)
    if name in data_names() or not path.exists():
        return name not in data_names() and (name.startswith("hf:") or name.count("/") == 1)
    held = sorted(path.iterdir()) if path.is_dir() else [path]
    return is_saved(path) or any(_suffix(file) == ".parquet" for file in held)


def _folder(name: str, root: str | Path | None) -> Path:
    chosen = root or os.environ.get(DATA_VARIABLE)
    if not chosen:
        raise DataError(
            f"the folder that holds {name!r} is unknown; give root= or set {DATA_VARIABLE} to the "
            f"folder that holds {name}/"
        )
    folder = Path(chosen) / name
    if not folder.is_dir():
        raise DataError(
            f"no folder {name} in {chosen}, which holds {listing(Path(chosen))}; put it there, or "
            f"point root= or {DATA_VARIABLE} to the folder that holds it"
        )
    return folder


def _from_path(path: Path, split: str, options: Mapping[str, Any]) -> Data:
    if is_saved(path):
        return load_files(path, split, **options)
    if path.is_dir():
        files = [file for file in sorted(path.iterdir()) if _suffix(file) in FILE_SUFFIXES]
        if has_images(path) or not files:
            pictures = any(file.suffix.lower() in PICTURES for file in path.rglob("*"))
            other = pictures and not has_images(path)
            return (load_files if other else load_images)(path, split, **options)
        by_split = {unpacked_name(file).removesuffix(_suffix(file)): file for file in files}
        path = pick_split(str(path), split, by_split)
    if _suffix(path) == ".parquet":
        return load_files(path, **options)
    if "text" in options:
        return load_table(path, **options)
    return (load_columns if _suffix(path) in TABLE_SUFFIXES else load_text)(path, **options)


def _suffix(file: Path) -> str:
    return Path(unpacked_name(file)).suffix


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, data_names(), n=1)
    guess = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(data_names())}."
    return (
        f"{name!r} is neither a known dataset nor a file or folder; {guess} Otherwise give the "
        f"path of a file or folder, or 'hf:{name}' for the Hugging Face Hub"
    )
