"""Linear CKA, biased and unbiased, exactly from sums over samples.

With rows `x_i` of one depth and `y_i` of another, `S = sum x_i y_i^T`, `s = sum x_i`,
`t = sum y_i`, `a_i = |x_i|^2`, `b_i = |y_i|^2`:

- biased (Tracing Representations, Eq. 3): `HSIC_0 ~ ||S - s t^T / n||_F^2`;
- unbiased (HSIC_1) of all n samples at once, with Gram matrices that have a zero diagonal:
  `tr(KL) = ||S||_F^2 - sum a_i b_i`, `1'K1 = |s|^2 - sum a_i`, and
  `1'KL1 = s'St - s'(sum x_i b_i) - t'(sum y_i a_i) + sum a_i b_i`.

The N x N Gram matrices are never formed, memory does not grow with N, and the estimate does not
depend on a batch size. Both are invariant to a shift of the features, so sums are taken around a
pilot mean: uncentered sums would lose all digits if the mean is large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BUFFER = 2**23  # numbers buffered before multiplying: products of many rows are fast


@dataclass(frozen=True)
class Similarity:
    """CKA of pairs of depths (rows: the first group); NaN if undefined."""

    biased: np.ndarray
    unbiased: np.ndarray


class CrossProducts:
    """Accumulates the sums for all pairs within one group of depths, or between two groups."""

    def __init__(self, widths: Sequence[int], others: Sequence[int] = ()) -> None:
        self.first, self.second = len(widths), len(others)
        sizes = [*widths, *others]
        self.widths = sizes
        self.edges = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        self.n = 0
        self.pilot: Tensor | None = None
        total = self.edges[-1]
        self._s = torch.zeros(total, dtype=torch.float64)
        self._a = torch.zeros(len(sizes), dtype=torch.float64)
        self._ab = torch.zeros(len(sizes), len(sizes), dtype=torch.float64)
        self._xb = torch.zeros(total, len(sizes), dtype=torch.float64)
        self._products = [
            [torch.zeros(size, stop - start, dtype=torch.float64) for start, stop in self._spans(i)]
            for i, size in enumerate(sizes)
        ]
        self._buffer = torch.empty(0)
        self._filled = 0

    def _spans(self, i: int) -> list[tuple[int, int]]:
        """The ranges of columns that depth i is multiplied with."""
        own = (self.edges[i], self.edges[i + 1])
        if not self.second:
            return [(own[0], self.edges[-1])]
        return [own, (self.edges[self.first], self.edges[-1])] if i < self.first else [own]

    @staticmethod
    def bytes_needed(widths: Sequence[int], others: Sequence[int] = ()) -> int:
        """The memory for the products, in float64."""
        if not others:
            tails = np.cumsum(list(widths)[::-1])[::-1]
            return int(8 * sum(w * int(t) for w, t in zip(widths, tails, strict=True)))
        own = sum(w * w for w in (*widths, *others))
        return 8 * (own + sum(widths) * sum(others))

    def add(self, features: Tensor, others: Tensor | None = None) -> None:
        """(depth, row, dim) of the first group and, if there is one, of the second."""
        parts = [features] if others is None else [features, others.to(features.dtype)]
        if self.pilot is None:
            mean = torch.cat([p.mean(1, dtype=torch.float64).flatten() for p in parts])
            self.pilot = mean.to(features.dtype)
            total = self.edges[-1]
            self._buffer = features.new_empty(max(BUFFER // total, 1), total)
            self._to(features.device)
        start, rows = 0, features.shape[1]
        while start < rows:
            stop = min(rows, start + len(self._buffer) - self._filled)
            self._put([p[:, start:stop] for p in parts])
            start = stop
            if self._filled == len(self._buffer):
                self._fold()

    def _put(self, parts: list[Tensor]) -> None:
        """Copy rows minus the pilot mean into the buffer, depths side by side."""
        assert self.pilot is not None
        count, column = parts[0].shape[1], 0
        rows = self._buffer[self._filled : self._filled + count]
        for part in parts:
            width = part.shape[0] * part.shape[2]
            pilot = self.pilot[column : column + width].view(part.shape[0], part.shape[2])
            place = rows[:, column : column + width].unflatten(1, pilot.shape)
            torch.sub(part.transpose(0, 1), pilot, out=place)
            column += width
        self._filled += count

    def _to(self, device: torch.device) -> None:
        if device.type == "cpu" or device.type == "mps":  # mps has no float64, so stay on the CPU
            return
        self._s, self._a, self._ab, self._xb = (
            t.to(device) for t in (self._s, self._a, self._ab, self._xb)
        )
        self._products = [[t.to(device) for t in row] for row in self._products]

    def _fold(self) -> None:
        if not self._filled:
            return
        x = self._buffer[: self._filled]
        self.n += self._filled
        self._filled = 0
        device = self._s.device
        parts = x.split(self.widths, 1)
        squares = torch.stack([torch.linalg.vector_norm(p, dim=1) for p in parts], 1).square()
        wide = squares.double().to(device)
        self._s += x.sum(0).to(device)
        self._a += wide.sum(0)
        self._ab += wide.T @ wide
        self._xb += (x.T @ squares).to(device, torch.float64)
        for i, row in enumerate(self._products):
            own = x[:, self.edges[i] : self.edges[i + 1]].T
            for (start, stop), total in zip(self._spans(i), row, strict=True):
                total += (own @ x[:, start:stop]).to(device)

    def similarity(self) -> Similarity:
        """CKA of all pairs from the sums so far."""
        self._fold()
        groups = (
            (range(self.first), range(self.first))
            if not self.second
            else (range(self.first), range(self.first, self.first + self.second))
        )
        cache: dict[tuple[int, int], tuple[float, float]] = {}

        def pair(i: int, j: int) -> tuple[float, float]:
            i, j = min(i, j), max(i, j)
            if (i, j) not in cache:
                cache[i, j] = self._hsic(i, j)
            return cache[i, j]

        found = np.full((2, len(groups[0]), len(groups[1])), np.nan)
        for r, i in enumerate(groups[0]):
            for c, j in enumerate(groups[1]):
                xy, xx, yy = pair(i, j), pair(i, i), pair(j, j)
                for kind in (0, 1):
                    scale = xx[kind] * yy[kind]
                    if xx[kind] > 0 and yy[kind] > 0 and scale > 0:
                        found[kind, r, c] = xy[kind] / scale**0.5
        return Similarity(found[0], found[1])

    def _hsic(self, i: int, j: int) -> tuple[float, float]:
        n, edges = self.n, self.edges
        start = edges[j]
        span = next(k for k, (a, b) in enumerate(self._spans(i)) if a <= start < b)
        offset = self._spans(i)[span][0]
        S = self._products[i][span][:, start - offset : edges[j + 1] - offset]
        mine, theirs = slice(edges[i], edges[i + 1]), slice(edges[j], edges[j + 1])
        s, t = self._s[mine], self._s[theirs]
        centered = S - torch.outer(s, t) / n
        biased = float(centered.square().sum())
        if self._constant(i) or self._constant(j):
            return 0.0, 0.0
        if n < 4:
            return biased, 0.0
        ab = self._ab[i, j]
        trace = S.square().sum() - ab
        k, m = s @ s - self._a[i], t @ t - self._a[j]
        mixed = s @ S @ t - s @ self._xb[mine, j] - t @ self._xb[theirs, i] + ab
        hsic = trace + k * m / ((n - 1) * (n - 2)) - 2 * mixed / (n - 2)
        return biased, float(hsic / (n * (n - 3)))

    def _constant(self, i: int) -> bool:
        """Whether the feature is the same for all samples, up to rounding."""
        assert self.pilot is not None
        part = slice(self.edges[i], self.edges[i + 1])
        s = self._s[part]
        variance = float(self._a[i] / self.n - (s @ s) / self.n**2)
        length = float((self.pilot[part].double().to(s.device) + s / self.n).square().sum())
        return variance <= 1e-12 * length or variance <= 0


class MinibatchCKA:
    """CKA from HSIC_1 averaged over chunks of rows, if the products do not fit in memory.

    Memory grows neither with N nor with the square of the width. Chunks have a fixed size, so the
    estimate does not depend on the batch size; it does depend on the order of the data.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._own: tuple[Tensor, Tensor] | None = None
        self.rows = 0

    def add(self, features: Tensor, others: Tensor | None = None) -> None:
        if features.shape[1] < 4:
            return
        left = _centered_grams(features)
        right = left if others is None else _centered_grams(others)
        # Chunks are weighted by their rows: the last, shorter one counts less.
        weight = features.shape[1] / (features.shape[1] * (features.shape[1] - 3))
        cross = left.flatten(1) @ right.flatten(1).T * weight
        own = (
            left.square().sum((1, 2)) * weight,
            right.square().sum((1, 2)) * weight,
        )
        self._sum = cross if self._sum is None else self._sum + cross
        self._own = own if self._own is None else (self._own[0] + own[0], self._own[1] + own[1])
        self.rows += features.shape[1]

    def similarity(self) -> np.ndarray:
        assert self._sum is not None
        assert self._own is not None
        scale = torch.outer(*self._own)
        found = torch.where(scale > 0, self._sum / scale.clamp(min=1e-300).sqrt(), torch.nan)
        return found.cpu().numpy()


def _centered_grams(features: Tensor) -> Tensor:
    """U-centered Gram matrices: `tr(K~ L~) / (n (n - 3))` is HSIC_1."""
    x = (features - features.mean(1, keepdim=True)).double()
    n = x.shape[1]
    gram = x @ x.mT
    gram.diagonal(dim1=1, dim2=2).zero_()
    rows = gram.sum(2) / (n - 2)
    total = gram.sum((1, 2)) / ((n - 1) * (n - 2))
    gram = gram - rows[:, :, None] - rows[:, None, :] + total[:, None, None]
    gram.diagonal(dim1=1, dim2=2).zero_()
    return gram
