"""Linear maps of a branch as matrices, whatever their module."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from everydepth.errors import UnsupportedModelError
from everydepth.stream.block import Block
from everydepth.stream.taps import hooked
from everydepth.stream.wrapping import plain_values


@dataclass(frozen=True)
class LinearMap:
    """A module that computes `W x + b` at every position.

    Its weight may be `(out, in)` as in `nn.Linear`, `(out, in, height, width)` as in `nn.Conv2d`,
    or `(in, out)` as in `Conv1D` of transformers.
    """

    module: nn.Module

    @property
    def weight(self) -> Tensor:
        found: Any = self.module.weight
        return found

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.module, "bias", None)

    @property
    def has_bias(self) -> bool:
        return self.bias is not None

    @property
    def sizes(self) -> tuple[int, int]:
        """Size of the output and of the input at one position (for a convolution, one patch)."""
        out, inside = self.weight.flatten(1).shape
        transposed = not isinstance(self.module, (nn.Linear, nn.Conv2d))
        return (inside, out) if transposed else (out, inside)

    def output_shape(self, x: Tensor) -> tuple[int, ...]:
        if isinstance(self.module, nn.Conv2d):
            return (len(x), self.module.out_channels, *_places(self._conv(), *x.shape[2:]))
        return (*x.shape[:-1], self.sizes[0])

    def inputs(self, x: Tensor, rows: int) -> Tensor:
        """The input `x` as `(row, position, in)`."""
        if isinstance(self.module, nn.Conv2d):
            return _patches(self._conv(), x)
        return x.reshape(rows, -1, x.shape[-1])

    def outputs(self, y: Tensor, rows: int) -> Tensor:
        """The output `y` as `(row, position, out)`."""
        if isinstance(self.module, nn.Conv2d):
            return y.flatten(2).transpose(1, 2)
        return y.reshape(rows, -1, y.shape[-1])

    def as_weight(self, matrix: Tensor) -> Tensor:
        """A matrix `(out, in)`, with inputs in the order of `inputs`, in the weight's layout."""
        if isinstance(self.module, nn.Conv2d):
            channels, height, width = self.weight.shape[1:]
            return matrix.reshape(-1, height, width, channels).permute(0, 3, 1, 2)
        return matrix if isinstance(self.module, nn.Linear) else matrix.T

    @torch.no_grad()
    def set(self, weight: Tensor, bias: Tensor) -> None:
        """Set its weight to the matrix `(out, in)`, and its bias if it has one."""
        self.weight.copy_(self.as_weight(weight))
        if self.bias is not None:
            self.bias.copy_(bias)

    def _conv(self) -> nn.Conv2d:
        conv = self.module
        assert isinstance(conv, nn.Conv2d)
        if conv.groups != 1 or isinstance(conv.padding, str):
            raise UnsupportedModelError(
                f"the last convolution of a branch has groups={conv.groups} and padding="
                f"{conv.padding!r}, and only one with groups=1 and numeric padding can be scored; "
                "insert blocks yourself (everydepth.insert) and train them"
            )
        return conv


def weight_spread(blocks: Sequence[Block]) -> dict[str, np.ndarray]:
    """By the name of a matrix inside its block, its standard deviation in each block.

    NaN if a block has no such matrix.
    """
    found: dict[str, np.ndarray] = {}
    for index, block in enumerate(blocks):
        for name, value in plain_values(block.module):
            if value.ndim >= 2:
                key = name.removesuffix(".weight")
                column = found.setdefault(key, np.full(len(blocks), np.nan))
                column[index] = float(value.double().std(correction=0))
    return found


@contextmanager
def first_maps(blocks: Sequence[Block]) -> Generator[list[list[nn.Module | None]], None, None]:
    """Per block and branch, the module with the first matrix applied; filled by a forward pass."""
    found: list[list[nn.Module | None]] = [[None] * len(block.branches) for block in blocks]
    handles: list[Any] = []
    for block, maps in zip(blocks, found, strict=True):
        now: list[int] = []

        def begin(i: int, now: list[int] = now) -> Any:
            return lambda *_: now.__setitem__(slice(None), [i])  # pyright: ignore[reportUnknownLambdaType]

        def note(
            module: nn.Module,
            *_: Any,
            maps: list[nn.Module | None] = maps,
            now: list[int] = now,
        ) -> None:
            if now and maps[now[0]] is None:
                maps[now[0]] = module

        for i, branch in enumerate(block.branches):
            handles.append(branch.entry.register_forward_pre_hook(begin(i)))
        for module in block.module.modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.ndim == 2:
                handles.append(module.register_forward_pre_hook(note))
    with hooked(*handles):
        yield found


def _places(conv: nn.Conv2d, *size: int) -> tuple[int, ...]:
    """Height and width of the output."""
    facts = (conv.padding, conv.dilation, conv.kernel_size, conv.stride)
    return tuple(
        (n + 2 * int(p) - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(size, *facts, strict=True)
    )


def _patches(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """`(row, position, patch)`, a patch in the order (y, x, channel).

    With channels last, a row of a patch is contiguous in memory, which makes this several times
    faster than `unfold`, whose patches are in the order of the weight.
    """
    (kh, kw), (dh, dw), (sh, sw) = conv.kernel_size, conv.dilation, conv.stride
    ph, pw = (int(p) for p in conv.padding)
    sizes = _places(conv, *x.shape[2:])
    last = F.pad(x.permute(0, 2, 3, 1), (0, 0, pw, pw, ph, ph)).contiguous()
    rows, _, _, channels = last.shape
    a, b, c, d = last.stride()
    views = last.as_strided(
        (rows, *sizes, kh, kw, channels), (a, b * sh, c * sw, b * dh, c * dw, d)
    )
    return views.reshape(rows, sizes[0] * sizes[1], kh * kw * channels)
