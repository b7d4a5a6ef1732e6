"""Data sets by name from the Hugging Face hub, through the optional package `datasets`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from everydepth.data.sets import Images, Table, Texts
from everydepth.data.tables import table_texts
from everydepth.errors import DataError


def load_hub(
    name: str,
    *,
    split: str = "train",
    task: str | None = None,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
) -> Images | Texts | Table:
    """A data set of the hub: images if it has an image column, texts if `text` or only one or
    two text columns say which, otherwise a table. `task` is the hub's configuration name."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{name!r} is neither a file or folder here nor a known name, and the Hugging Face hub "
            "needs the package datasets; run pip install 'everydepth[data]'"
        ) from error
    try:
        rows: Any = datasets.load_dataset(name, task, split=split)
    except Exception as error:  # the hub raises a dozen types; all mean "not here"
        raise DataError(_why(name, task, split, error)) from error
    features = dict(rows.features)
    if label is None:
        label = next((n for n, f in features.items() if isinstance(f, datasets.ClassLabel)), None)
    classes = tuple(getattr(features.get(label), "names", ())) if label else ()
    image = next((n for n, f in features.items() if isinstance(f, datasets.Image)), None)
    if image is not None:
        return _images(name, rows, image, label, classes)
    strings = [n for n, f in features.items() if getattr(f, "dtype", None) == "string"]
    if text is None and 1 <= len(strings) <= 2:
        text, pair = (strings * 2)[0], (*strings, None)[1]
    table = Table({n: tuple("" if v is None else str(v) for v in rows[n]) for n in features})
    if text is None:
        return table
    return table_texts(
        table, text=text, pair=pair, label=label, classes=classes or None, source=name
    )


def _images(
    name: str, rows: Any, image: str, label: str | None, classes: tuple[str, ...]
) -> Images:
    if label is None:
        raise DataError(
            f"{name} has no class labels among {', '.join(rows.features)}; say which column with "
            "label="
        )
    # A mode of mixed grey and colour images would not stack, so anything but grey becomes colour.
    pictures = [np.asarray(p if p.mode == "L" else p.convert("RGB")) for p in rows[image]]
    sizes = {picture.shape for picture in pictures}
    if len(sizes) != 1:
        raise DataError(
            f"{name} has images of {len(sizes)} shapes, for example {sorted(map(str, sizes))[:3]}, "
            "but one is needed; resize them with datasets and Images(...) yourself"
        )
    pixels = torch.from_numpy(np.stack(pictures))
    pixels = pixels.unsqueeze(1) if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    labels = torch.as_tensor(rows[label][:], dtype=torch.long)
    return Images(pixels, labels, classes or tuple(map(str, range(int(labels.max()) + 1))))


def _why(name: str, task: str | None, split: str, error: Exception) -> str:
    what = f"{name!r} (task {task!r}, split {split!r})"
    switches = [s for s in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if _is_on(s)]
    if switches:
        return (
            f"{what} is neither here nor in the cache of datasets, and {switches[0]} is set; unset "
            "it to use the network, or give the path of a file or folder"
        )
    return (
        f"{what} is neither here nor found on the Hugging Face hub ({type(error).__name__}: "
        f"{str(error)[:200]}); check name, task and network, or give the path of a file or folder"
    )


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").upper() in {"1", "ON", "YES", "TRUE"}
