"""A random sample of the predictions, and the standard error it causes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everydepth.errors import SettingError
from everydepth.stream import TOKEN_TASKS, ResidualStream, Targets
from everydepth.tracing.observation import placeholder_prediction


@dataclass(eq=False)
class DrawnRows:
    """Sampled predictions, by their number in the data, ascending; the same in every pass."""

    numbers: Tensor
    total: int
    _passed: int = field(default=0, init=False)

    @classmethod
    def of(
        cls, stream: ResidualStream, batches: Iterable[Mapping[str, Any]], count: int, seed: int
    ) -> DrawnRows:
        """A uniform sample of `count` predictions. The data is iterated, but not run."""
        if count < 1:
            raise SettingError(f"tokens={count}; use 1 or more, or None for all")
        if stream.task not in TOKEN_TASKS:
            raise SettingError(
                f"tokens={count}, but {stream.name} predicts per sample, not per token; use "
                "max_samples"
            )
        total = sum(rows_in(stream, batch) for batch in batches)
        random = torch.Generator().manual_seed(seed)
        return cls(torch.randperm(total, generator=random)[:count].sort().values, total)

    def restart(self) -> None:
        self._passed = 0

    def take(self, rows: int) -> Tensor:
        """Which of the next `rows` predictions are in the sample."""
        first, self._passed = self._passed, self._passed + rows
        low, high = torch.searchsorted(self.numbers, torch.tensor([first, self._passed])).tolist()
        return self.numbers[low:high] - first

    def error(self, sums: np.ndarray, squares: np.ndarray, count: int) -> np.ndarray:
        """Standard error of the sample mean, given sums of values and of squares."""
        mean = sums / count
        variance = np.maximum(squares / count - mean**2, 0) * count / max(count - 1, 1)
        # Finite population correction, for sampling without replacement.
        missing = max(1 - len(self.numbers) / self.total, 0)
        return np.sqrt(variance / count * missing)


def rows_in(stream: ResidualStream, batch: Mapping[str, Any]) -> int:
    """The number of predictions in a batch of tokens, without running the model."""
    kept = {k: v for k, v in batch.items() if k != "labels" or stream.task != "causal_lm"}
    return len(Targets.every(stream, kept, placeholder_prediction(stream, batch)))
