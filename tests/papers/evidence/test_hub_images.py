"""Images of the hub as rows, from a data set made here."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pytest
import torch

from everydepth_papers.evidence.hub_images import MEAN, STD, HubImages


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 12, 12, 3), dtype=np.uint8)
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    from PIL import Image

    rows = datasets.Dataset.from_dict(
        {"img": [Image.fromarray(p) for p in pixels], "label": [1, 0, 1]}, features=features
    )

    def load(name: str, split: str) -> Any:
        assert (name, split) == ("owner/name", "train")
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    return pixels


def test_pixels_are_normalized_and_labels_kept(pictures: np.ndarray) -> None:
    rows = HubImages("owner/name", "train", size=12)
    assert (len(rows), rows.classes) == (3, ("cat", "dog"))
    expected = (pictures[0] / 255 - np.array(MEAN)) / np.array(STD)
    assert np.allclose(rows[0]["pixel_values"].permute(1, 2, 0), expected, atol=1e-5)
    assert [int(rows[i]["labels"]) for i in range(3)] == [1, 0, 1]


def test_noise_is_the_same_at_every_look_and_differs_between_rows(pictures: np.ndarray) -> None:
    plain = HubImages("owner/name", "train", size=12)
    noisy = HubImages("owner/name", "train", size=12, noise=0.3)
    assert torch.equal(noisy[0]["pixel_values"], noisy[0]["pixel_values"])
    added = [noisy[i]["pixel_values"] - plain[i]["pixel_values"] for i in (0, 1)]
    assert 0.25 < float(added[0].std()) < 0.35
    assert not torch.allclose(added[0], added[1])


def test_augmentation_keeps_the_size_and_follows_the_seed(pictures: np.ndarray) -> None:
    rows = HubImages("owner/name", "train", size=16, augment=True)
    torch.manual_seed(1)
    first, second = rows[0]["pixel_values"], rows[0]["pixel_values"]
    assert first.shape == (3, 16, 16)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(rows[0]["pixel_values"], first)
