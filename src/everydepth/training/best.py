"""The best validation so far, and early stopping."""

from __future__ import annotations

import math
from dataclasses import dataclass

from everydepth.errors import SettingError
from everydepth.stream import ResidualStream
from everydepth.training.config import EarlyStopping
from everydepth.training.scoring import Scores

LOWER_IS_BETTER = ("loss", "mse", "perplexity")


@dataclass(kw_only=True)
class Best:
    """The step and value of the best validation. new: it has no checkpoint yet."""

    step: int | None = None
    value: float | None = None
    without_gain: int = 0
    new: bool = False

    def judge(
        self, step: int, scores: Scores, rule: EarlyStopping | None, stream: ResidualStream
    ) -> str | None:
        """Record a validation; returns why to stop, or None."""
        watched = rule or EarlyStopping()
        if watched.metric not in scores:
            raise SettingError(
                f"early stopping watches {watched.metric!r}, but validation measures "
                f"{', '.join(scores)}; use one of these"
            )
        depth = stream.check_depth(watched.depth or stream.depth, lowest=1)
        value = scores[watched.metric][depth - 1]
        gain = math.inf
        if self.value is not None:
            gain = value - self.value
            if watched.metric in LOWER_IS_BETTER:
                gain = -gain
        if gain > watched.min_delta:
            self.step, self.value, self.without_gain, self.new = step, value, 0, True
        else:
            self.without_gain += 1
        if rule is None or self.without_gain < rule.patience:
            return None
        return (
            f"early stopping: {rule.metric} at depth {depth} did not improve in {rule.patience} "
            f"validations; best {self.value:.6g} at step {self.step}"
        )
