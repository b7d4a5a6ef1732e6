"""Crops and mirror images."""

from __future__ import annotations

import pytest
import torch

from everydepth.data import batches, crop_and_flip, load_digits
from everydepth.errors import SettingError


def images(rows: int = 6) -> dict[str, torch.Tensor]:
    pixels = torch.arange(rows * 2 * 5 * 4, dtype=torch.float32).reshape(rows, 2, 5, 4) + 1
    return {"pixel_values": pixels, "labels": torch.arange(rows)}


def test_every_image_is_a_shift_of_itself_or_of_its_mirror() -> None:
    batch = images(64)
    changed = crop_and_flip(2)(batch, torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(batch["pixel_values"], (2, 2, 2, 2))
    mirrors = 0
    for image, whole in zip(changed["pixel_values"], padded, strict=True):
        ways = {
            (y, x, mirrored): crop.flip(-1) if mirrored else crop
            for y in range(5)
            for x in range(5)
            for mirrored in (False, True)
            for crop in [whole[:, y : y + 5, x : x + 4]]
        }
        found = [way for way, crop in ways.items() if torch.equal(crop, image)]
        assert len(found) == 1
        mirrors += found[0][2]
    assert 16 <= mirrors <= 48
    assert torch.equal(changed["labels"], batch["labels"])


def test_without_padding_and_flips_nothing_changes() -> None:
    batch = images()
    same = crop_and_flip(0, flip=False)(batch, torch.Generator().manual_seed(0))
    assert torch.equal(same["pixel_values"], batch["pixel_values"])


def test_the_same_seed_and_epoch_give_the_same_pixels() -> None:
    rows = load_digits("train").subset(range(40))
    first, again = (
        [b["pixel_values"] for b in batches(rows, 16, shuffle=True, transform=crop_and_flip(1))]
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_images_of_one_channel_keep_the_plain_memory_layout() -> None:
    """Strides that look like channels last corrupt memory in oneDNN's convolutions."""
    pixels = torch.rand(4, 1, 8, 8)
    found = crop_and_flip(1)({"pixel_values": pixels}, torch.Generator().manual_seed(0))
    assert found["pixel_values"].stride() == pixels.stride()


def test_a_negative_padding_is_refused() -> None:
    with pytest.raises(SettingError, match=r"padding=-1\); use a whole number of 0 or more"):
        crop_and_flip(-1)
