from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from everydepth.data import Images, Table, Texts, load, load_hub
from everydepth.errors import DataError


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Data sets the hub answers with, so that no test needs the network."""
    known: dict[str, Any] = {}

    def load_dataset(name: str, task: str | None, *, split: str) -> Any:
        if name not in known:
            raise ConnectionError(f"cannot reach the hub for {name}, {task}, {split}")
        return known[name]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    return known


def labeled(names: list[str], **columns: Any) -> Any:
    features = {"label": datasets.ClassLabel(names=names)}
    kinds = {"image": datasets.Image(), "label": features["label"]}
    schema = datasets.Features({n: kinds.get(n, datasets.Value("string")) for n in columns})
    return datasets.Dataset.from_dict(columns, features=schema)


def test_one_text_column_and_a_class_label_become_texts(hub: dict[str, Any]):
    hub["owner/reviews"] = labeled(["neg", "pos"], text=["good", "bad"], label=[1, 0])
    data = load("owner/reviews", kind=Texts)
    assert data.texts == ("good", "bad")
    assert data.pairs is None
    assert data.labels is not None
    assert (data.labels.tolist(), data.classes) == ([1, 0], ("neg", "pos"))


def test_labels_of_the_hub_are_positions_and_a_missing_one_is_no_class(hub: dict[str, Any]):
    hub["digits"] = labeled(["1", "0"], text=["one", "nought"], label=[0, 1])
    data = load("hf:digits", kind=Texts)
    assert data.labels is not None
    assert (data.labels.tolist(), data.classes) == ([0, 1], ("1", "0"))
    hub["hidden"] = labeled(["no", "yes"], text=["a", "b"], label=[-1, -1])
    assert load("hf:hidden", kind=Texts).labels is None
    hub["half"] = labeled(["no", "yes"], text=["a", "b"], label=[1, None])
    with pytest.raises(DataError, match="the label of row 1 of half is missing"):
        load("hf:half")


def test_two_text_columns_become_pairs_and_three_a_table_unless_chosen(hub: dict[str, Any]):
    hub["two"] = labeled(["n", "y"], a=["1"], b=["2"], label=[0])
    assert load("hf:two", kind=Texts).pairs == ("2",)
    hub["three"] = labeled(["n", "y"], a=["1"], b=["2"], c=["3"], label=[1])
    assert load("hf:three", kind=Table)["c"] == ("3",)
    chosen = load("hf:three", kind=Texts, text="c")
    assert (chosen.texts, chosen.pairs) == (("3",), None)


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3), ("RGBA", 3)])
def test_images_stack_to_bytes(hub: dict[str, Any], mode: str, channels: int):
    pictures = [Image.new(mode, (5, 4)) for _ in range(3)]
    hub["pictures"] = labeled(["a", "b"], image=pictures, label=[0, 1, 1])
    data = load("hf:pictures", kind=Images)
    assert data.pixel_values.shape == (3, channels, 4, 5)
    assert data.labels.tolist() == [0, 1, 1]
    assert data.pixel_values.numpy().dtype == np.uint8


def test_images_of_different_sizes_are_refused(hub: dict[str, Any]):
    pictures = [Image.new("L", (5, 4)), Image.new("L", (6, 4))]
    hub["pictures"] = labeled(["a"], image=pictures, label=[0, 0])
    with pytest.raises(DataError, match=r"pictures has images of 2 shapes, for example .*resize"):
        load_hub("pictures")


def test_images_without_labels_are_refused(hub: dict[str, Any]):
    hub["pictures"] = labeled([], image=[Image.new("L", (5, 4))])
    with pytest.raises(
        DataError, match=r"pictures has no class labels among image; give the column as label="
    ):
        load_hub("pictures")


def test_a_failure_names_the_request_and_the_reason(hub: dict[str, Any]):
    what = r"'no/where' \(task None, split 'test'\)"
    message = rf"{what} is neither a local file nor on the Hugging Face Hub .*ConnectionError"
    with pytest.raises(DataError, match=message):
        load("no/where", split="test")


def test_offline_mode_is_named(hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"HF_HUB_OFFLINE is set; unset it to use the network, or"):
        load("no/where")


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the package datasets; run pip install 'everydepth"):
        load("no/where")


def pictures(folder: Path, sizes: dict[str, tuple[int, int]]) -> None:
    for number, (place, size) in enumerate(sizes.items()):
        file = folder / place
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", size, number).save(file)


def test_a_folder_of_pictures_for_each_class_becomes_images(tmp_path: Path):
    pictures(tmp_path, {f"{name}/{i}.png": (5, 4) for name in ("cat", "dog") for i in range(2)})
    data = load(tmp_path, kind=Images)
    assert data.classes == ("cat", "dog")
    assert data.pixel_values.shape == (4, 1, 4, 5)
    shades = data.pixel_values[:, 0, 0, 0].long()
    assert sorted(shades.tolist()) == [0, 1, 2, 3]
    assert (data.labels == shades // 2).all()


def test_reading_a_folder_says_nothing_of_downloads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pictures(tmp_path, {"cat/0.png": (5, 4), "dog/0.png": (5, 4)})
    load(tmp_path)
    assert capsys.readouterr().err == ""
    assert not datasets.are_progress_bars_disabled()


def test_folders_of_pictures_have_splits(tmp_path: Path):
    parts = {"train": 2, "validation": 1, "test": 3}
    places = [f"{part}/{c}/{i}.png" for part, n in parts.items() for c in "ab" for i in range(n)]
    pictures(tmp_path, dict.fromkeys(places, (5, 4)))
    assert [len(load(tmp_path, s, kind=Images)) for s in ("train", "valid", "test")] == [4, 2, 6]
    with pytest.raises(DataError, match=r"split 'extra', but .* has 'train', 'valid', 'test'"):
        load(tmp_path, "extra")


def test_a_folder_with_a_broken_picture_is_named(tmp_path: Path):
    pictures(tmp_path, {"a/0.png": (5, 4), "b/0.png": (5, 4)})
    (tmp_path / "b" / "1.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"(picture that )?cannot be read"):
        load(tmp_path)


def test_a_parquet_file_becomes_texts_or_a_table(tmp_path: Path):
    rows = {"text": ["2020-01-01", "null"], "label": [10, 9]}
    for name in ("train", "test"):
        datasets.Dataset.from_dict(rows).to_parquet(tmp_path / f"{name}.parquet")
    for data in (load(tmp_path / "train.parquet", kind=Texts), load(tmp_path, "test", kind=Texts)):
        assert data.texts == ("2020-01-01", "null")
        assert data.labels is not None
        assert (data.labels.tolist(), data.classes) == ([1, 0], ("9", "10"))
    numbers = tmp_path / "numbers.parquet"
    datasets.Dataset.from_dict({"size": [1.5, 2.0], "loss": [3, 2]}).to_parquet(numbers)
    assert load(numbers, kind=Table).numbers("size").tolist() == [1.5, 2.0]
    numbers.write_bytes(numbers.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"numbers.parquet cannot be read as parquet \(.*truncated"):
        load(numbers)


def test_a_column_called_text_is_the_text(hub: dict[str, Any]):
    hub["two"] = labeled(["n", "y"], title=["1"], text=["2"], label=[0])
    data = load("hf:two", kind=Texts)
    assert (data.texts, data.pairs) == (("2",), None)


def test_what_save_to_disk_wrote_is_read(tmp_path: Path):
    rows = labeled(["neg", "pos"], text=["good", "bad"], label=[1, 0])
    parts = {"train": rows, "validation": rows.select([1])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "split"))
    data = load(tmp_path / "split", "valid", kind=Texts)
    assert data.texts == ("bad",)
    assert data.labels is not None
    assert (data.labels.tolist(), data.classes) == ([0], ("neg", "pos"))
    rows.save_to_disk(str(tmp_path / "whole"))
    assert load(tmp_path / "whole", kind=Texts).texts == ("good", "bad")
    with pytest.raises(DataError, match=r"split 'test', but .*whole has 'train'"):
        load(tmp_path / "whole", "test")
    (tmp_path / "whole" / "state.json").write_text("{")
    with pytest.raises(DataError, match="save it again with save_to_disk"):
        load(tmp_path / "whole")
