"""Data read by the optional package `datasets`: the Hub, what it saved, parquet, image folders."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from everydepth.config import checked
from everydepth.data.reading import Absent, pick_split
from everydepth.data.sets import Images, Table, Texts, numbered
from everydepth.data.tables import table_texts
from everydepth.errors import DataError


@checked
def load_hub(
    name: str,
    split: str = "train",
    *,
    task: str | None = None,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    classes: Sequence[str] | None = None,
) -> Images | Texts | Table:
    """A dataset of the Hub: images if it has an image column; texts if `text` is given, a column
    has this name, or there are only one or two text columns; otherwise a table.

    task: the Hub's configuration name.
    classes: of labels whose names the dataset does not know, by default those that occur.
    """
    datasets = _package(
        f"{name!r} is neither a local file or folder nor a known name, and the Hugging Face Hub"
    )
    try:
        rows = datasets.load_dataset(name, task, split=split)
    except Exception as error:  # the Hub raises a dozen types; all mean "not found"
        raise Absent(_why(name, task, split, error)) from error
    return _data(name, rows, text=text, pair=pair, label=label, classes=classes)


@checked
def load_files(
    path: str | Path,
    split: str = "train",
    *,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    classes: Sequence[str] | None = None,
) -> Images | Texts | Table:
    """A parquet file, what `save_to_disk` wrote (without splits, all rows are in `train`), or a
    folder with one of images per class (perhaps in `train/`, ...); as `load_hub` gives it."""
    path = Path(path)
    saved = is_saved(path)
    kind, where = ("imagefolder", "data_dir") if path.is_dir() else ("parquet", "data_files")
    repair = "save it again with save_to_disk" if saved else "download it again"
    kind = "saved by datasets" if saved else kind
    datasets = _package(f"{path}: {kind}")
    try:
        if saved:
            found = datasets.load_from_disk(str(path))
        else:
            with TemporaryDirectory() as cache, _without_bars(datasets):
                found = datasets.load_dataset(
                    kind, cache_dir=cache, keep_in_memory=True, **{where: str(path)}
                )
    except Exception as error:  # whatever the reader of the format raises
        raise DataError(
            f"{path} cannot be read as {kind} ({error.__cause__ or error}); it may be truncated, "
            f"so {repair}"
        ) from error
    found = found if isinstance(found, dict) else {"train": found}
    splits = {"valid" if key == "validation" else key: rows for key, rows in found.items()}
    rows = pick_split(str(path), split, splits)
    return _data(str(path), rows, text=text, pair=pair, label=label, classes=classes)


def is_saved(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk` of the package `datasets`."""
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


@contextmanager
def _without_bars(datasets: Any) -> Generator[None, None, None]:
    """Inside the context, `datasets` does not say that it downloads what lies here."""
    if datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def _package(what: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{what} needs the package datasets; run pip install 'everydepth[data]'"
        ) from error
    return datasets


def _data(
    name: str,
    rows: Any,
    *,
    text: str | None,
    pair: str | None,
    label: str | None,
    classes: Sequence[str] | None,
) -> Images | Texts | Table:
    """Rows read by `datasets`; see `load_hub`."""
    features = dict(rows.features)
    kinds = {type(feature).__name__: column for column, feature in reversed(features.items())}
    if label is None:
        usual = (column for column in ("label", "labels") if column in features)
        label = kinds.get("ClassLabel") or next(usual, None)
    own = tuple(getattr(features.get(label), "names", ())) if label else ()
    if "Image" in kinds:
        return _images(name, rows, kinds["Image"], label, own)
    strings = [n for n, f in features.items() if getattr(f, "dtype", None) == "string"]
    strings = [n for n in strings if n != label]
    if text is None and "text" in strings:
        text = "text"
    elif text is None and 1 <= len(strings) <= 2:
        text, pair = strings[0], pair or (*strings, None)[1]
    columns = {n: tuple("" if v is None else str(v) for v in rows[n]) for n in features}
    if own and label:
        # Labels are class numbers, and -1 means none.
        numbers = [-1 if v is None else int(v) for v in rows[label]]
        columns[label] = tuple("" if n < 0 else own[n] for n in numbers)
        label = None if set(numbers) == {-1} else label
    if text is None:
        return Table(columns)
    return table_texts(
        Table(columns), text=text, pair=pair, label=label, classes=own or classes, source=name
    )


def _images(
    name: str, rows: Any, image: str, label: str | None, classes: tuple[str, ...]
) -> Images:
    if label is None:
        raise DataError(
            f"{name} has no class labels among {', '.join(rows.features)}; give the column as "
            "label="
        )
    # Images of different modes do not stack, so anything but grayscale becomes RGB.
    try:
        pictures = [np.asarray(p if p.mode == "L" else p.convert("RGB")) for p in rows[image]]
    except (OSError, SyntaxError) as error:
        raise DataError(
            f"{name} has an image that cannot be read ({error}); remove or repair it"
        ) from error
    sizes = {picture.shape for picture in pictures}
    if len(sizes) != 1:
        raise DataError(
            f"{name} has images of {len(sizes)} shapes, for example {sorted(map(str, sizes))[:3]}, "
            "but all must have the same; resize them with datasets and use Images(...)"
        )
    pixels = torch.from_numpy(np.stack(pictures))
    pixels = pixels.unsqueeze(1) if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    labels = torch.as_tensor(rows[label][:], dtype=torch.long)
    return Images(pixels, labels, classes or numbered(labels, name))


def _why(name: str, task: str | None, split: str, error: Exception) -> str:
    what = f"{name!r} (task {task!r}, split {split!r})"
    switches = [s for s in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if _is_on(s)]
    if switches:
        return (
            f"{what} is neither a local file nor in the cache of datasets, and {switches[0]} is "
            "set; unset it to use the network, or give the path of a file or folder"
        )
    return (
        f"{what} is neither a local file nor on the Hugging Face Hub ({type(error).__name__}: "
        f"{str(error)[:200]}); check name, task and network, or give the path of a file or folder"
    )


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").upper() in {"1", "ON", "YES", "TRUE"}
