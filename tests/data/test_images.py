from __future__ import annotations

import gzip
import lzma
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from everydepth.data import load_images
from everydepth.errors import DataError

RANDOM = np.random.default_rng(0)


def idx(array: np.ndarray) -> bytes:
    sizes = np.array(array.shape, dtype=">u4").tobytes()
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def pixels(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


PACKINGS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("packing", PACKINGS)
def test_idx_files_round_trip(tmp_path: Path, packing: str):
    pictures, labels = pixels(6, 4, 5), np.arange(6, dtype=np.uint8)
    pack = PACKINGS[packing]
    (tmp_path / f"t10k-images-idx3-ubyte{packing}").write_bytes(pack(idx(pictures)))
    (tmp_path / f"t10k-labels-idx1-ubyte{packing}").write_bytes(pack(idx(labels)))
    loaded = load_images(tmp_path, split="test")
    assert (loaded.pixel_values[:, 0].numpy() == pictures).all()
    assert loaded.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert loaded.classes == ("0", "1", "2", "3", "4", "5")


def test_two_idx_sets_in_one_folder_are_not_guessed_between(tmp_path: Path):
    for name in ("digits", "letters"):
        (tmp_path / f"{name}-train-images-idx3-ubyte").write_bytes(idx(pixels(2, 4, 4)))
    with pytest.raises(
        DataError, match=r"2 image files for one split, digits-.*; keep one file per folder"
    ):
        load_images(tmp_path)


def cifar(path: Path, labels: np.ndarray, pictures: np.ndarray) -> None:
    rows = len(pictures)
    path.write_bytes(np.concatenate([labels.reshape(rows, -1), pictures.reshape(rows, -1)], 1))


def test_cifar_10_binaries_round_trip_in_batch_order(tmp_path: Path):
    pictures, labels = pixels(22, 3, 32, 32), RANDOM.integers(0, 10, 22, dtype=np.uint8)
    for number in range(11):  # batch 10 sorts before 2 as text
        part = slice(2 * number, 2 * number + 2)
        cifar(tmp_path / f"data_batch_{number + 1}.bin", labels[part], pictures[part])
    (tmp_path / "batches.meta.txt").write_text("\n".join("abcdefghij") + "\n\n")
    loaded = load_images(tmp_path)
    assert (loaded.pixel_values.numpy() == pictures).all()
    assert loaded.labels.tolist() == labels.tolist()
    assert loaded.classes == tuple("abcdefghij")


def test_cifar_100_binaries_give_fine_or_coarse_labels(tmp_path: Path):
    pictures = pixels(3, 3, 32, 32)
    labels = np.array([[1, 99], [0, 5], [19, 50]], dtype=np.uint8)
    cifar(tmp_path / "train.bin", labels, pictures)
    (tmp_path / "coarse_label_names.txt").write_text("\n".join(f"c{i}" for i in range(20)))
    fine, coarse = load_images(tmp_path), load_images(tmp_path, coarse=True)
    assert fine.labels.tolist() == [99, 5, 50]
    assert coarse.labels.tolist() == [1, 0, 19]
    assert coarse.classes[19] == "c19"
    assert (fine.pixel_values.numpy() == pictures).all()


def sheet(path: Path, pictures: np.ndarray, columns: int) -> None:
    rows = len(pictures) // columns
    tiles = pictures.reshape(rows, columns, 3, 32, 32).transpose(0, 3, 1, 4, 2)
    image = Image.fromarray(np.ascontiguousarray(tiles.reshape(rows * 32, columns * 32, 3)))
    image.save(path, lossless=True)


def sheets(folder: Path, labels: np.ndarray | None = None) -> np.ndarray:
    pictures = pixels(12, 3, 32, 32)
    sheet(folder / "data_batch_1.webp", pictures[:6], columns=2)
    sheet(folder / "data_batch_2.webp", pictures[6:], columns=3)
    np.save(
        folder / "train_labels.npy", np.arange(12, dtype=np.uint8) if labels is None else labels
    )
    return pictures


def test_lossless_sheets_round_trip_row_by_row(tmp_path: Path):
    pictures = sheets(tmp_path)
    loaded = load_images(tmp_path)
    assert (loaded.pixel_values.numpy() == pictures).all()
    assert loaded.labels.tolist() == list(range(12))


def test_a_folder_without_images_is_answered_with_the_known_layouts(tmp_path: Path):
    (tmp_path / "notes.md").touch()
    with pytest.raises(DataError, match=r"which holds notes.md; expected IDX files.*CIFAR.*sheets"):
        load_images(tmp_path)
    with pytest.raises(DataError, match=r"nowhere, which holds nothing: there is no such folder"):
        load_images(tmp_path / "nowhere")


def test_a_split_that_is_not_there_is_answered_with_the_ones_that_are(tmp_path: Path):
    sheets(tmp_path)
    message = r"split 'valid', but .* has 'train'; use one of these, or make a part with .split"
    with pytest.raises(DataError, match=message):
        load_images(tmp_path, split="valid")


def bad_idx(folder: Path, images: bytes, labels: bytes | None) -> None:
    (folder / "train-images-idx3-ubyte").write_bytes(images)
    if labels is not None:
        (folder / "train-labels-idx1-ubyte").write_bytes(labels)


GOOD_LABELS = idx(np.zeros(2, dtype=np.uint8))


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (idx(pixels(2, 4, 4))[:-3], GOOD_LABELS, r"idx3-ubyte unpacks to 45 bytes, .* says 48"),
        (b"\x89PNG", GOOD_LABELS, r"starts with 89 50 4e 47, but an IDX file .* 00 00 08 03"),
        (b"", GOOD_LABELS, r"starts with nothing, but an IDX file"),
        (idx(pixels(2, 4, 4)), None, r"has no labels next to it; put train-labels-idx1-ubyte or"),
        (idx(pixels(3, 4, 4)), GOOD_LABELS, r"3 images but 2 labels in .*download the files again"),
    ],
)
def test_broken_idx_files_are_named(
    tmp_path: Path, images: bytes, labels: bytes | None, message: str
):
    bad_idx(tmp_path, images, labels)
    with pytest.raises(DataError, match=message):
        load_images(tmp_path)


@pytest.mark.parametrize("packing", [".gz", ".xz"])
def test_truncated_and_corrupt_packed_files_are_named(tmp_path: Path, packing: str):
    packed = PACKINGS[packing](idx(pixels(20, 8, 8)))
    file = tmp_path / f"train-images-idx3-ubyte{packing}"
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(GOOD_LABELS)
    for broken in (packed[:-20], packed[:40] + bytes(40) + packed[80:]):
        file.write_bytes(broken)
        with pytest.raises(
            DataError, match=rf"ubyte\{packing} is truncated or corrupt .*download it again"
        ):
            load_images(tmp_path)
    file.write_bytes(b"plain")
    with pytest.raises(DataError, match=rf"starts with 70 .*, but a \{packing} file starts with"):
        load_images(tmp_path)


@pytest.mark.parametrize("packing", [".gz", ".xz"])
def test_a_small_file_that_unpacks_to_a_huge_one_is_refused(
    tmp_path: Path, packing: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("everydepth.data.reading.MOST_UNPACKED", 2**16)
    bomb = PACKINGS[packing](bytes(2**24))
    (tmp_path / f"train-images-idx3-ubyte{packing}").write_bytes(bomb)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(GOOD_LABELS)
    with pytest.raises(DataError, match=r"ubyte\..z has .* bytes and unpacks to more than .*trust"):
        load_images(tmp_path)


def test_broken_cifar_binaries_are_named(tmp_path: Path):
    file = tmp_path / "data_batch_1.bin"
    file.write_bytes(bytes(3073 * 2 - 1))
    with pytest.raises(
        DataError, match=r"data_batch_1.bin holds 6145 bytes, but CIFAR records are"
    ):
        load_images(tmp_path)
    file.write_bytes(bytes([10]) + bytes(3072))
    with pytest.raises(DataError, match=r"data_batch_1.bin has label 10, but 0 to 9 are allowed"):
        load_images(tmp_path)
    file.write_bytes(bytes(3073))
    with pytest.raises(DataError, match=r"coarse=True, but CIFAR-10 has one kind of label"):
        load_images(tmp_path, coarse=True)
    (tmp_path / "data_batch_3.bin").write_bytes(bytes(3073))
    with pytest.raises(DataError, match=r"batches 1, 3 in .*must run from 1 without a gap"):
        load_images(tmp_path)


@pytest.mark.parametrize("label", [10**15, -1])
def test_a_label_of_no_class_is_named_before_classes_are_counted(label: int, tmp_path: Path):
    sheets(tmp_path, labels=np.full(12, label))
    with pytest.raises(DataError, match=rf"label {label} in .*, but classes without names are 0"):
        load_images(tmp_path)


def test_broken_sheets_are_named(tmp_path: Path):
    sheets(tmp_path, labels=np.zeros(5, dtype=np.uint8))
    with pytest.raises(DataError, match=r"12 images but 5 labels"):
        load_images(tmp_path)
    np.save(tmp_path / "train_labels.npy", np.zeros(12))
    with pytest.raises(DataError, match=r"holds float64 of shape \(12,\), but labels are whole"):
        load_images(tmp_path)
    np.save(tmp_path / "train_labels.npy", np.zeros(12, dtype=np.uint8))
    whole = (tmp_path / "data_batch_1.webp").read_bytes()
    (tmp_path / "data_batch_1.webp").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"data_batch_1.webp is not an image Pillow can read"):
        load_images(tmp_path)
    Image.new("RGB", (33, 32)).save(tmp_path / "data_batch_1.webp", lossless=True)
    with pytest.raises(DataError, match=r"is 33x32, but a sheet consists of 32x32 tiles"):
        load_images(tmp_path)
    (tmp_path / "train_labels.npy").unlink()
    with pytest.raises(DataError, match=r"train_labels.npy cannot be read \(No such file"):
        load_images(tmp_path)


@pytest.mark.parametrize("byte", range(10, 80))
def test_a_flipped_bit_in_the_header_of_labels_is_named(byte: int, tmp_path: Path):
    sheets(tmp_path)
    file = tmp_path / "train_labels.npy"
    content = bytearray(file.read_bytes())
    content[byte] ^= 8
    file.write_bytes(content)
    with suppress(DataError):  # anything else is an error; some bits do not matter
        load_images(tmp_path)


def test_labels_that_would_need_a_pickle_are_refused(tmp_path: Path):
    sheets(tmp_path)
    np.save(tmp_path / "train_labels.npy", np.array([{"code": 1}], dtype=object))
    with pytest.raises(DataError, match=r"train_labels.npy is not a plain .npy file"):
        load_images(tmp_path)


def test_a_label_beyond_the_given_classes_is_refused(tmp_path: Path):
    sheets(tmp_path)
    with pytest.raises(DataError, match=r"label 11 in .*, but 2 classes allow 0 to 1"):
        load_images(tmp_path, classes=("a", "b"))
