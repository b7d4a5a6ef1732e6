from __future__ import annotations

import sys
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


def labelled(names: list[str], **columns: Any) -> Any:
    features = {"label": datasets.ClassLabel(names=names)}
    kinds = {"image": datasets.Image(), "label": features["label"]}
    schema = datasets.Features({n: kinds.get(n, datasets.Value("string")) for n in columns})
    return datasets.Dataset.from_dict(columns, features=schema)


def test_one_text_column_and_a_class_label_become_texts(hub: dict[str, Any]):
    hub["owner/reviews"] = labelled(["neg", "pos"], text=["good", "bad"], label=[1, 0])
    data = load("owner/reviews", kind=Texts)
    assert data.texts == ("good", "bad")
    assert data.pairs is None
    assert data.labels is not None
    assert (data.labels.tolist(), data.classes) == ([1, 0], ("neg", "pos"))


def test_two_text_columns_become_pairs_and_three_a_table_unless_chosen(hub: dict[str, Any]):
    hub["two"] = labelled(["n", "y"], a=["1"], b=["2"], label=[0])
    assert load("hf:two", kind=Texts).pairs == ("2",)
    hub["three"] = labelled(["n", "y"], a=["1"], b=["2"], c=["3"], label=[1])
    assert load("hf:three", kind=Table)["c"] == ("3",)
    chosen = load("hf:three", kind=Texts, text="c")
    assert (chosen.texts, chosen.pairs) == (("3",), None)


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3), ("RGBA", 3)])
def test_images_stack_to_bytes(hub: dict[str, Any], mode: str, channels: int):
    pictures = [Image.new(mode, (5, 4)) for _ in range(3)]
    hub["pictures"] = labelled(["a", "b"], image=pictures, label=[0, 1, 1])
    data = load("hf:pictures", kind=Images)
    assert data.pixel_values.shape == (3, channels, 4, 5)
    assert data.labels.tolist() == [0, 1, 1]
    assert data.pixel_values.numpy().dtype == np.uint8


def test_images_of_different_sizes_are_refused(hub: dict[str, Any]):
    pictures = [Image.new("L", (5, 4)), Image.new("L", (6, 4))]
    hub["pictures"] = labelled(["a"], image=pictures, label=[0, 0])
    with pytest.raises(DataError, match=r"pictures has images of 2 shapes, for example .*resize"):
        load_hub("pictures")


def test_images_without_labels_are_refused(hub: dict[str, Any]):
    hub["pictures"] = labelled([], image=[Image.new("L", (5, 4))])
    with pytest.raises(DataError, match=r"pictures has no class labels among image; say which"):
        load_hub("pictures")


def test_a_failure_says_what_was_asked_and_why(hub: dict[str, Any]):
    message = r"'no/where' \(task None, split 'test'\) is neither here nor found .*ConnectionError"
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
