"""Features in chunks of a fixed size, held for a second look if memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from everydepth.stream import ResidualStream
from everydepth.tracing.metric import FeatureMetric, Level
from everydepth.tracing.observation import FeatureRows

CHUNK = 512  # rows; large enough for fast matrix products, and independent of the batch size


@dataclass(eq=False)
class FeatureStore:
    """Divides rows into chunks and passes each to the metrics.

    Chunks, and so sums over them, do not depend on the batch size. For metrics with two passes,
    `held` keeps the chunks up to `budget` bytes; beyond that, all are dropped and the data must run
    again.
    """

    metrics: Sequence[FeatureMetric]
    stream: ResidualStream
    budget: int
    rows: int = 0
    held: list[FeatureRows] | None = None
    _waiting: list[FeatureRows] = field(default_factory=list[FeatureRows])
    _second: bool = False

    def __post_init__(self) -> None:
        if self.twice:
            self.held = []

    @property
    def twice(self) -> list[FeatureMetric]:
        return [m for m in self.metrics if m.passes == 2]

    @property
    def needs_labels(self) -> bool:
        return self.level != "token" and any("labels" in m.needs for m in self.metrics)

    @property
    def must_run_again(self) -> bool:
        """Whether a second look is needed but the features were dropped."""
        return bool(self.twice) and self.held is None

    def add(self, features: Tensor, targets: Tensor | None, other: Tensor | None) -> None:
        targets = None if targets is None else targets.to(features.device)
        rows = FeatureRows(self.stream, features, targets, other, self._second)
        count, start = features.shape[1], 0
        if self._waiting:
            start = min(CHUNK - self._waiting_rows, count)
            self._waiting.append(_cut(rows, slice(0, start)))
            if self._waiting_rows == CHUNK:
                self.flush()
        # Whole chunks are views: a large batch is not copied.
        while count - start >= CHUNK:
            self._hand_out(_cut(rows, slice(start, start + CHUNK)))
            start += CHUNK
        if start < count:
            self._waiting.append(_copied(_cut(rows, slice(start, count))))

    def flush(self) -> None:
        """Pass on waiting rows, even if they are fewer than a chunk."""
        if self._waiting:
            rows, self._waiting = _joined(self._waiting), []
            self._hand_out(rows)

    @property
    def _waiting_rows(self) -> int:
        return sum(part.features.shape[1] for part in self._waiting)

    @property
    def level(self) -> Level:
        return self.metrics[0].level

    def second_look(self) -> None:
        """Pass on the held chunks once more."""
        for rows in self.held or ():
            for metric in self.twice:
                metric.update(rows)

    def start_second(self) -> None:
        self._second, self._waiting = True, []

    def _hand_out(self, rows: FeatureRows) -> None:
        for metric in self.twice if self._second else self.metrics:
            metric.update(rows)
        if self._second:
            return
        self.rows += rows.features.shape[1]
        if self.held is not None:
            self.held.append(replace(_copied(rows), second=True))
            size = sum(_bytes(part) for part in self.held)
            if size > self.budget:
                self.held = None


def _bytes(rows: FeatureRows) -> int:
    tensors = (rows.features, rows.other)
    return sum(t.nbytes for t in tensors if t is not None)


def _joined(parts: Sequence[FeatureRows]) -> FeatureRows:
    def cat(get: Callable[[FeatureRows], Tensor | None], dim: int) -> Tensor | None:
        found = [t for t in map(get, parts) if t is not None]
        return torch.cat(found, dim) if found else None

    if len(parts) == 1:
        return parts[0]
    features = cat(lambda p: p.features, 1)
    assert features is not None
    return replace(
        parts[0],
        features=features,
        targets=cat(lambda p: p.targets, 0),
        other=cat(lambda p: p.other, 1),
    )


def _copied(rows: FeatureRows) -> FeatureRows:
    """A copy, because a view would keep the whole batch alive."""
    other = None if rows.other is None else rows.other.clone()
    return replace(rows, features=rows.features.clone(), other=other)


def _cut(rows: FeatureRows, where: slice) -> FeatureRows:
    return replace(
        rows,
        features=rows.features[:, where],
        targets=None if rows.targets is None else rows.targets[where],
        other=None if rows.other is None else rows.other[:, where],
    )
