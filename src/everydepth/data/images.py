"""Images from a local folder: IDX files, CIFAR binaries, or sheets of tiles."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from everydepth.config import checked
from everydepth.data.reading import decode, listing, pick_split, read_bytes, unpacked_name
from everydepth.data.sets import Images, numbered
from everydepth.errors import DataError
from everydepth.files import MALFORMED_ARRAY, explained

_SIDE = 32  # CIFAR's images are 32x32 with 3 channels
_PIXELS = 3 * _SIDE * _SIDE


class _Layout(NamedTuple):
    patterns: Mapping[str, tuple[str, ...]]
    read: Callable[[list[Path], str, bool], tuple[np.ndarray, np.ndarray]]
    names: str | None = None
    """The file with one class name per line."""


@checked
@explained("the images cannot be read", DataError)
def load_images(
    folder: str | Path,
    split: str = "train",
    *,
    classes: Sequence[str] | None = None,
    coarse: bool = False,
) -> Images:
    """The labeled images in a folder, as bytes; `coarse` uses CIFAR-100's 20 superclasses."""
    folder = Path(folder)
    for layout in _LAYOUTS:
        if present := _present(folder, layout):
            pixels, labels = layout.read(pick_split(str(folder), split, present), split, coarse)
            names = tuple(classes or _class_names(folder, layout.names, coarse))
            return _images(pixels, labels, names, folder)
    raise DataError(
        f"no images in {folder}, which holds {listing(folder)}; expected IDX files "
        "(train-images-idx3-ubyte.gz), CIFAR binaries (data_batch_1.bin, train.bin), sheets "
        "(data_batch_1.webp with train_labels.npy), or a folder of images per class"
    )


def has_images(folder: Path) -> bool:
    """Whether `load_images` knows the files of this folder."""
    return any(_present(folder, layout) for layout in _LAYOUTS)


def _present(folder: Path, layout: _Layout) -> dict[str, list[Path]]:
    found = {split: _matching(folder, globs) for split, globs in layout.patterns.items()}
    return {split: files for split, files in found.items() if files}


def _images(pixels: np.ndarray, labels: np.ndarray, names: tuple[str, ...], folder: Path) -> Images:
    if len(pixels) != len(labels) or len(labels) == 0:
        raise DataError(
            f"{len(pixels)} images but {len(labels)} labels in {folder}; each image needs one "
            "label, so download the files again"
        )
    names = names or numbered(torch.from_numpy(labels.astype(np.int64)), folder)
    if int(labels.max()) >= len(names) or int(labels.min()) < 0:
        wrong = int(labels.max()) if int(labels.max()) >= len(names) else int(labels.min())
        raise DataError(
            f"label {wrong} in {folder}, but {len(names)} classes allow 0 to {len(names) - 1}; "
            "download the files again, or correct classes="
        )
    return Images(torch.from_numpy(pixels), torch.from_numpy(labels.astype(np.int64)), names)


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Matching files in numeric order, preferring a plain file to its packed copy."""
    found = sorted(path for pattern in patterns for path in folder.glob(pattern))
    by_name: dict[str, Path] = {}
    for path in found:
        by_name.setdefault(unpacked_name(path), path)
    number_of = {path: re.search(r"_(\d+)\.", path.name) for path in by_name.values()}
    numbered = {int(match[1]): path for path, match in number_of.items() if match}
    if not numbered:
        return list(by_name.values())
    numbers = sorted(numbered)
    if numbers != list(range(1, len(numbers) + 1)):
        raise DataError(
            f"batches {', '.join(map(str, numbers))} in {folder}, but they must run from 1 "
            "without a gap; download the missing ones"
        )
    return [numbered[number] for number in numbers]


def _class_names(folder: Path, name: str | None, coarse: bool) -> list[str]:
    if name is None:
        return []
    path = folder / name.format(level="coarse" if coarse else "fine")
    return decode(path.read_bytes(), path).split() if path.is_file() else []


def _read_idx(files: list[Path], split: str, coarse: bool) -> tuple[np.ndarray, np.ndarray]:
    images = files[0]
    if len(files) > 1:
        raise DataError(
            f"{len(files)} image files for one split, {', '.join(f.name for f in files)}, in "
            f"{images.parent}; keep one file per folder"
        )
    labels_name = unpacked_name(images).replace("images", "labels").replace("idx3", "idx1")
    candidates = [images.with_name(labels_name + packing) for packing in ("", ".gz", ".xz")]
    labels = next((path for path in candidates if path.is_file()), None)
    if labels is None:
        raise DataError(
            f"{images} has no labels next to it; put {labels_name} or {labels_name}.gz there"
        )
    return _idx_array(images, 3)[:, None], _idx_array(labels, 1)


def _idx_array(path: Path, dimensions: int) -> np.ndarray:
    content = read_bytes(path)
    header = 4 + 4 * dimensions
    # IDX: two zero bytes, 8 for unsigned bytes, the number of dimensions, then each big-endian.
    expected = bytes([0, 0, 8, dimensions])
    if not content.startswith(expected) or len(content) < header:
        raise DataError(
            f"{path} starts with {content[:4].hex(' ') or 'nothing'}, but an IDX file of bytes in "
            f"{dimensions} dimension(s) starts with {expected.hex(' ')}; download it again"
        )
    shape = [int(size) for size in np.frombuffer(content[4:header], dtype=">u4")]
    needed = header + int(np.prod(shape, dtype=np.int64))
    if len(content) != needed:
        raise DataError(
            f"{path} unpacks to {len(content)} bytes, but its header {shape} says {needed}; "
            "it is truncated or corrupt, so download it again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape).copy()


def _cifar_reader(
    label_bytes: int, classes: Sequence[int]
) -> Callable[[list[Path], str, bool], tuple[np.ndarray, np.ndarray]]:
    """A reader of records of `label_bytes` label bytes and 3072 pixels."""

    def read(files: list[Path], split: str, coarse: bool) -> tuple[np.ndarray, np.ndarray]:
        if coarse and label_bytes == 1:
            raise DataError(
                "coarse=True, but CIFAR-10 has one kind of label; only CIFAR-100 has superclasses, "
                "so use coarse=False"
            )
        column = label_bytes - 1 - int(coarse)
        records = np.concatenate([one(path, column) for path in files])
        pixels = records[:, label_bytes:].reshape(-1, 3, _SIDE, _SIDE).copy()
        return pixels, records[:, column]

    def one(path: Path, column: int) -> np.ndarray:
        content, size = read_bytes(path), label_bytes + _PIXELS
        if len(content) % size or not content:
            raise DataError(
                f"{path} holds {len(content)} bytes, but CIFAR records are {size} bytes each; "
                "it is truncated or corrupt, so download it again"
            )
        records = np.frombuffer(content, dtype=np.uint8).reshape(-1, size)
        largest = int(records[:, column].max())
        if largest >= classes[column]:
            raise DataError(
                f"{path} has label {largest}, but 0 to {classes[column] - 1} are allowed; "
                "it is corrupt or not a CIFAR binary, so download it again"
            )
        return records

    return read


def _read_sheets(files: list[Path], split: str, coarse: bool) -> tuple[np.ndarray, np.ndarray]:
    path = files[0].with_name(f"{split}_labels.npy")
    try:
        labels = np.load(io.BytesIO(read_bytes(path)), allow_pickle=False)
    except MALFORMED_ARRAY as error:
        raise DataError(
            f"{path} is not a plain .npy file ({error}); save it with np.save(allow_pickle=False)"
        ) from error
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"{path} holds {labels.dtype} of shape {labels.shape}, but labels are whole numbers "
            "in one dimension; save it again"
        )
    return np.concatenate([_tiles(file) for file in files]), labels


def _tiles(path: Path) -> np.ndarray:
    """The 32x32 tiles of a sheet, row by row."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            sheet = np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{path} is not an image Pillow can read ({error}); download it again"
        ) from error
    height, width, _ = sheet.shape
    if height % _SIDE or width % _SIDE:
        raise DataError(
            f"{path} is {width}x{height}, but a sheet consists of {_SIDE}x{_SIDE} tiles; "
            "download it again"
        )
    tiles = sheet.reshape(height // _SIDE, _SIDE, width // _SIDE, _SIDE, 3)
    return np.ascontiguousarray(tiles.transpose(0, 2, 4, 1, 3)).reshape(-1, 3, _SIDE, _SIDE)


_LAYOUTS = (
    _Layout(
        {"train": ("*train-images*idx3*",), "test": ("*t10k-images*idx3*", "*test-images*idx3*")},
        _read_idx,
    ),
    _Layout(
        {"train": ("data_batch_*.bin*",), "test": ("test_batch.bin*",)},
        _cifar_reader(1, [10]),
        names="batches.meta.txt",
    ),
    _Layout(
        # CIFAR-100 writes the coarse label first, then the fine one.
        {"train": ("train.bin*",), "test": ("test.bin*",)},
        _cifar_reader(2, [20, 100]),
        names="{level}_label_names.txt",
    ),
    _Layout({"train": ("data_batch_*.webp",), "test": ("test_batch.webp",)}, _read_sheets),
)
