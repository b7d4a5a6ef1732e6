"""A moment in training, for which an objective gives its weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from everydepth.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Step `step` (from 0) of `total_steps`, in a network of `depth` blocks."""

    step: int
    total_steps: int | None
    depth: int
    seed: int = 0

    @property
    def progress(self) -> float:
        """The completed share of training, 0 to 1."""
        return min(self.step / self.steps, 1.0)

    @property
    def steps(self) -> int:
        """The total number of steps; an error if unknown."""
        if self.total_steps is None or self.total_steps < 1:
            raise SettingError(
                f"the objective changes over training, but the number of steps is "
                f"{self.total_steps}; call `net.set_progress(step, total_steps)` before each step"
            )
        return self.total_steps

    def random(self, *purpose: int) -> np.random.Generator:
        """Random numbers that depend only on seed, step and purpose, so that resuming is exact.

        purpose: a number for the part (`Sampled` has 0, `LayerDropout` 1), and more to subdivide.
        """
        return np.random.default_rng([self.seed, self.step, *purpose])
