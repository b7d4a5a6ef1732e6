"""Images of the Hugging Face hub as rows, decoded and resized when they are asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from everydepth.errors import DataError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
PADDING = 1 / 8  # of the side, around a randomly cropped image
ROTATION = 15  # degrees either way


class HubImages(Dataset[dict[str, Tensor]]):
    """`pixel_values` of one size and `labels`, for sets too large to hold decoded.

    augment: random crop with padding, flip and rotation, as in Tracing Representations, App. B.
    They are drawn from torch's own generator, which `fit` seeds. noise: standard deviation of
    Gaussian noise on the normalized pixels.
    """

    def __init__(
        self,
        name: str,
        split: str,
        *,
        size: int,
        augment: bool = False,
        noise: float = 0.0,
        mean: tuple[float, ...] = MEAN,
        std: tuple[float, ...] = STD,
    ) -> None:
        try:
            import datasets
        except ImportError as error:
            raise DataError(
                f"{name!r} comes from the Hugging Face hub; run pip install 'everydepth[data]'"
            ) from error
        self.rows: Any = datasets.load_dataset(name, split=split)
        self.size, self.augment, self.noise = size, augment, noise
        self.mean, self.std = (torch.tensor(v).view(3, 1, 1) for v in (mean, std))
        kinds = dict(self.rows.features)
        self.image = next(n for n, f in kinds.items() if isinstance(f, datasets.Image))
        self.label = next(n for n, f in kinds.items() if isinstance(f, datasets.ClassLabel))
        self.classes: tuple[str, ...] = tuple(kinds[self.label].names)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        picture = row[self.image].convert("RGB").resize((self.size, self.size))
        if self.augment:
            picture = _augmented(picture, self.size)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float().div_(255)
        pixels = (pixels - self.mean) / self.std
        if self.noise:
            # A function of the row alone, so that all models see the same shifted images.
            pixels += self.noise * torch.randn(
                pixels.shape, generator=torch.Generator().manual_seed(index)
            )
        return {"pixel_values": pixels, "labels": torch.tensor(row[self.label])}


def _augmented(picture: Any, size: int) -> Any:
    from PIL import Image, ImageOps

    turn, flip, left, top = torch.rand(4).tolist()
    picture = picture.rotate((2 * turn - 1) * ROTATION, Image.Resampling.BILINEAR)
    if flip < 0.5:
        picture = ImageOps.mirror(picture)
    border = round(size * PADDING)
    x, y = round(left * 2 * border), round(top * 2 * border)
    return ImageOps.expand(picture, border).crop((x, y, x + size, y + size))
