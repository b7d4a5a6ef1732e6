"""When a prediction is decided: saturation, effective depth, margins."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from everydepth.errors import SettingError
from everydepth.results.result import Result, gap
from everydepth.tracing.metric import BatchMetric, register_metric
from everydepth.tracing.metrics.predictive import CLASSES, LABELS
from everydepth.tracing.metrics.shared import DEPTH, Kept, array
from everydepth.tracing.observation import Observation

MARGIN_BYTES = 2**26
SAMPLE_BYTES = 2**25


def saturation_depth(top: Tensor) -> Tensor:
    """(depths 0..L, rows) decisions -> (rows,) smallest l from which on they are the last one."""
    return _from_where(top == top[-1])


def _from_where(good: Tensor) -> Tensor:
    """The smallest depth from which on all are true; L + 1 where the last is not."""
    return (~good.flip(0).int().cumprod(0).bool()).sum(0)


@register_metric
class Saturation(BatchMetric):
    """Rows (samples or tokens) whose prediction is final from each depth on."""

    reads = frozenset({"top"})
    some_depths = True
    name = "saturation"
    title = "Where predictions become final"
    about = "Share of predictions that no later block changes, at each depth and up to it."
    section = "decisions"
    kind = "histogram"
    group = "decisions"
    tasks = CLASSES

    def __init__(self) -> None:
        self.count: Tensor | None = None

    def update(self, observation: Observation) -> None:
        at = saturation_depth(observation.predictions.top)
        found = torch.bincount(at, minlength=observation.depth + 1)
        self.count = found if self.count is None else self.count + found

    def compute(self) -> Result:
        if self.count is None or not bool(self.count.any()):
            return gap(self.name, "histogram", "no data was seen")
        count = array(self.count)
        where = self.depths(len(count) - 1)
        return Result(
            name=self.name,
            kind="histogram",
            series=("count",),
            arrays={
                "depth": where,
                "count": count,
                "cumulative": np.cumsum(count) / count.sum(),
            },
            labels={
                "depth": DEPTH,
                "count": "predictions that become final",
                "cumulative": "share that is final",
            },
            meta={"rows": int(count.sum()), "mean_depth": float(where @ count / count.sum())},
        )


@register_metric
class PredictionDepth(BatchMetric):
    """Per row: the depth at which its prediction becomes final, and from which it is right.

    `right_from` is L + 1 for a row that the full model gets wrong; without labels it is left out.
    """

    reads = frozenset({"top"})
    some_depths = True
    name = "prediction_depth"
    title = "Final and right"
    about = (
        "From which depth each prediction is final, against from which depth it is right; "
        "one more than the last depth means never."
    )
    section = "decisions"
    kind = "table"
    group = "decisions"
    tasks = CLASSES

    def __init__(self) -> None:
        self.kept = Kept(SAMPLE_BYTES)
        self.rows = 0
        self.labelled = False

    def update(self, observation: Observation) -> None:
        p, targets = observation.predictions, observation.targets
        self.rows += p.top.shape[1]
        right = torch.full_like(p.top[0], -1)
        if targets is not None:
            self.labelled = True
            right = torch.where(p.labelled, _from_where(p.top == targets).int(), -1)
        sample = observation.row_sample.to(right.device)
        self.kept.add(torch.stack([sample, saturation_depth(p.top), right], 1))

    def compute(self) -> Result:
        if not self.rows:
            return gap(self.name, "table", "no data was seen")
        sample, final, right = self.kept.values().astype(np.int64).T
        arrays = {"final_from": self.depth_of(final), "sample": sample}
        if self.labelled:
            right = np.where(right < 0, right, self.depth_of(right))
            arrays["right_from"] = np.ma.masked_less(right, 0) if (right < 0).any() else right
        cut = self.kept.rows < self.rows
        return Result(
            name=self.name,
            kind="table",
            series=tuple(name for name in ("final_from", "right_from") if name in arrays),
            arrays=arrays,
            labels={
                "final_from": "depth from which the prediction is final (blocks)",
                "right_from": "depth from which the prediction is right (blocks)",
            },
            meta={"rows": self.kept.rows},
            note=f"the first {self.kept.rows:,} of {self.rows:,} predictions" if cut else None,
        )


@register_metric
class Margin(BatchMetric):
    """Top-1 minus top-2 logit, mean over rows, with quantiles."""

    reads = frozenset({"margin"})
    some_depths = True
    name = "margin"
    title = "Margin"
    about = "How far the best answer is ahead of the second; boxes show the middle half of samples."
    better = "higher"
    section = "decisions"
    group = "decisions"
    tasks = CLASSES

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.rows = 0
        self.kept = Kept(MARGIN_BYTES)

    def update(self, observation: Observation) -> None:
        margin = observation.predictions.margin
        found = margin.sum(1, dtype=torch.float64)
        self.total = found if self.total is None else self.total + found
        self.rows += margin.shape[1]
        self.kept.add(margin.T)

    def compute(self) -> Result:
        if self.total is None or not self.rows:
            return gap(self.name, "curve", "no data was seen")
        value = array(self.total) / self.rows
        return Result(
            name=self.name,
            kind="curve",
            series=("value",),
            arrays={"depth": self.depths(len(value) - 1), "value": value, **self.kept.quantiles()},
            labels={"depth": DEPTH, "value": "margin, top-1 minus top-2 (logit)"},
            meta={"rows": self.rows, "quantile_rows": self.kept.rows},
        )


def effective_depth(accuracy: np.ndarray, epsilon: float) -> tuple[int, int]:
    """(absolute, relative): smallest l with `acc_l >= 1 - eps`, or `acc_l >= acc_L - eps`; else L.

    `accuracy` holds depths 0..L.
    """
    if not 0 <= epsilon <= 1:
        raise SettingError(f"epsilon {epsilon}; use a share between 0 and 1")
    last = len(accuracy) - 1

    def first(enough: float) -> int:
        # A share of N samples is a rounded number: 1 - 0.9 is a little more than 0.1.
        found = np.flatnonzero(np.asarray(accuracy) >= enough - 1e-12)
        return int(found[0]) if len(found) else last

    return first(1 - epsilon), first(float(accuracy[-1]) - epsilon)


@register_metric
class EffectiveDepth(BatchMetric):
    """Epsilon-effective depth, absolute and relative to the full model, for several epsilon."""

    reads = frozenset({"top"})
    some_depths = True
    name = "effective_depth"
    title = "Depth needed"
    about = "The fewest blocks that give up no more than so much accuracy."
    section = "decisions"
    kind = "table"
    group = "decisions"
    needs = LABELS
    tasks = CLASSES

    def __init__(self, epsilons: tuple[float, ...] = (0.0, 0.01, 0.02, 0.05, 0.1)) -> None:
        self.epsilons = epsilons
        self.right: Tensor | None = None
        self.rows = 0

    def update(self, observation: Observation) -> None:
        p, targets = observation.predictions, observation.targets
        if targets is None:
            return
        found = ((p.top == targets) & p.labelled).sum(1)
        self.right = found if self.right is None else self.right + found
        self.rows += int(p.labelled.sum())

    def compute(self) -> Result:
        if self.right is None or not self.rows:
            return gap(self.name, "table", "no row of the data has a label")
        accuracy = array(self.right) / self.rows
        found = self.depth_of(np.array([effective_depth(accuracy, e) for e in self.epsilons]))
        return Result(
            name=self.name,
            kind="table",
            series=("epsilon", "relative", "absolute"),
            arrays={
                "epsilon": np.array(self.epsilons),
                "relative": found[:, 1],
                "absolute": found[:, 0],
            },
            labels={
                "epsilon": "accuracy given up",
                "relative": "within epsilon of full depth (blocks)",
                "absolute": "accuracy of 1 - epsilon (blocks)",
            },
            meta={"rows": self.rows},
        )
