"""Random crops and flips, as a transform for `batches`."""

from __future__ import annotations

from typing import Annotated

import torch
from torch.nn import functional as F  # noqa: N812 (its usual name)

from everydepth.config import Setting, checked
from everydepth.data.batches import Transform
from everydepth.data.sets import Batch


@checked
def crop_and_flip(padding: Annotated[int, Setting(least=0)] = 4, *, flip: bool = True) -> Transform:
    """A transform that shifts every image by up to `padding` pixels and flips half of them.

    >>> from everydepth.data import batches, crop_and_flip
    >>> some = next(iter(batches(train, 32, shuffle=True, transform=crop_and_flip(1))))
    >>> some["pixel_values"].shape
    torch.Size([32, 1, 8, 8])
    """

    def change(batch: Batch, generator: torch.Generator) -> Batch:
        pixels = batch["pixel_values"]
        rows, _, height, width = pixels.shape
        padded = F.pad(pixels, (padding,) * 4)
        shifts = torch.randint(0, 2 * padding + 1, (2, rows), generator=generator)
        mirrored = torch.rand(rows, generator=generator) < (0.5 if flip else 0.0)
        across = torch.arange(width).expand(rows, width)
        across = torch.where(mirrored[:, None], across.flip(1), across) + shifts[0][:, None]
        down = torch.arange(height) + shifts[1][:, None]
        index = torch.arange(rows)[:, None, None]
        # Advanced indexing moves the channels, a slice between the indices, to the end.
        chosen = padded[index, :, down[:, :, None], across[:, None, :]]
        # A clone because `contiguous` keeps the strides of a single channel, which look like
        # channels last: oneDNN then writes out of bounds in a first convolution's backward pass.
        moved = chosen.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)
        return {**batch, "pixel_values": moved}

    return change
