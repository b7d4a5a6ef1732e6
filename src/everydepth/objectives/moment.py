"""When and where weights are asked for: a step of training, in a network of some depth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from everydepth.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A step, counted from 0, of `total_steps`; `depth` blocks; the seed of what is drawn."""

    step: int
    total_steps: int | None
    depth: int
    seed: int = 0

    @property
    def progress(self) -> float:
        """The share of training that is done, 0 to 1."""
        return min(self.step / self.steps, 1.0)

    @property
    def steps(self) -> int:
        """How long the training is; an error if that is unknown."""
        if self.total_steps is None or self.total_steps < 1:
            raise SettingError(
                f"the objective changes over training, but the number of steps is "
                f"{self.total_steps}; call `net.set_progress(step, total_steps)` before each step"
            )
        return self.total_steps

    def random(self, *purpose: int) -> np.random.Generator:
        """Random numbers that are a function of seed, step and purpose alone: resuming is exact.

        purpose: a number of the part's own (`Sampled` has 0, `LayerDropout` 1), and more to split.
        """
        return np.random.default_rng([self.seed, self.step, *purpose])
