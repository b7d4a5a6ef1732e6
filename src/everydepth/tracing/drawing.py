"""A seeded sample of all predictions of the data, and the error that it causes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everydepth.errors import SettingError
from everydepth.stream import ResidualStream, Targets


@dataclass(eq=False)
class DrawnRows:
    """Numbers of predictions, counted over the data, in order. Every pass sees the same."""

    numbers: Tensor
    total: int
    _passed: int = field(default=0, init=False)

    @classmethod
    def of(
        cls, stream: ResidualStream, batches: Iterable[Mapping[str, Any]], count: int, seed: int
    ) -> DrawnRows:
        """`count` of all predictions, each with the same chance; the data is counted, not run."""
        if count < 1:
            raise SettingError(f"tokens={count}; use 1 or more, or None for all")
        if stream.task not in ("causal_lm", "masked_lm"):
            raise SettingError(
                f"tokens={count}, but {stream.name} predicts a sample, not a token; use max_samples"
            )
        total = sum(rows_in(stream, batch) for batch in batches)
        random = torch.Generator().manual_seed(seed)
        return cls(torch.randperm(total, generator=random)[:count].sort().values, total)

    def restart(self) -> None:
        self._passed = 0

    def take(self, rows: int) -> Tensor:
        """Which of the next `rows` predictions are drawn."""
        first, self._passed = self._passed, self._passed + rows
        low, high = torch.searchsorted(self.numbers, torch.tensor([first, self._passed])).tolist()
        return self.numbers[low:high] - first

    def error(self, sums: np.ndarray, squares: np.ndarray, count: int) -> np.ndarray:
        """Standard error of the mean over the drawn, as an estimate of the mean over all."""
        mean = sums / count
        variance = np.maximum(squares / count - mean**2, 0) * count / max(count - 1, 1)
        # Drawn without putting back: all of them leave no error.
        missing = max(1 - len(self.numbers) / self.total, 0)
        return np.sqrt(variance / count * missing)


def rows_in(stream: ResidualStream, batch: Mapping[str, Any]) -> int:
    """How many predictions a batch of tokens has, without running the model."""
    first = next(batch[key] for key in stream.inputs if batch.get(key) is not None)
    kept = {k: v for k, v in batch.items() if k != "labels" or stream.task == "masked_lm"}
    shape = torch.empty(1, device=first.device).expand(*first.shape[:2], stream.outputs or 1)
    return len(Targets.every(stream, kept, shape))
