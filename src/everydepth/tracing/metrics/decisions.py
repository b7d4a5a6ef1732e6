"""Where predictions are decided: saturation, effective depth, margins."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor

from everydepth.config import Setting, checked
from everydepth.errors import SettingError
from everydepth.results.result import Result
from everydepth.stream.states import holds_from
from everydepth.tracing.metric import BatchMetric, register_metric
from everydepth.tracing.metrics.predictive import CLASSES, LABELS
from everydepth.tracing.observation import Observation


def saturation_depth(top: Tensor) -> Tensor:
    """The depth from which on the predicted class is the final one: (depths, rows) -> (rows,)."""
    return holds_from(top == top[-1])


class _Decision(BatchMetric):
    reads = frozenset({"top"})
    some_depths = True
    section = "decisions"
    group = "decisions"
    tasks = CLASSES


@register_metric
class Saturation(_Decision):
    """The number of predictions (samples or tokens) that become final at each depth."""

    name = "saturation"
    title = "Where predictions become final"
    about = "Share of predictions that become final at each depth, and up to it."
    kind = "histogram"

    def update(self, observation: Observation) -> None:
        at = saturation_depth(observation.predictions.top)
        self.sums.add(count=torch.bincount(at, minlength=observation.depth + 1))

    def compute(self) -> Result:
        count = self.sums.array("count")
        where = self.depths(len(count) - 1)
        return self.over_depths(
            {"count": count},
            beside={"cumulative": np.cumsum(count) / count.sum()},
            labels={
                "count": "predictions that become final",
                "cumulative": "share that is final",
            },
            meta={"rows": int(count.sum()), "mean_depth": float(where @ count / count.sum())},
        )


@register_metric
class ProbabilityRises(_Decision):
    """How often the label's probability rises when a feature gets closer to the last one.

    According to Theorem 2 of Tracing Representations, always. Closeness is the cosine with the last
    depth; steps start at depth 1.
    """

    reads = frozenset({"loss"})
    some_depths = False
    name = "probability_rises"
    title = "Does getting closer raise the probability?"
    about = "Of the samples that get closer to their last feature, those whose label gains."
    unit = "share"
    needs = LABELS
    default = False

    def update(self, observation: Observation) -> None:
        p = observation.predictions
        if observation.depth < 2:
            return
        h = observation.features[1:, p.labeled].double()
        near = torch.cosine_similarity(h, h[-1:], dim=-1)
        closer = near[1:] > near[:-1]
        # The probability of the label is exp(-loss).
        rises = p.loss[1:, p.labeled].double().diff(dim=0) < 0
        self.sums.add(closer=closer.sum(1), both=(closer & rises).sum(1))

    def compute(self) -> Result:
        if not self.sums or not bool(self.sums["closer"].any()):
            return self.gap("no labeled sample gets closer to the last depth anywhere")
        closer, both = self.sums.array("closer"), self.sums.array("both")
        return self.over_depths(
            {"value": np.where(closer > 0, both / np.maximum(closer, 1), np.nan)},
            first=2,
            beside={"closer": closer},
            labels={
                "value": "share whose label gains probability",
                "closer": "samples that get closer",
            },
            meta={"share": float(both.sum() / closer.sum())},
        )


@register_metric
class PredictionDepth(_Decision):
    """Per row, the depth from which its prediction is final, and from which it is right.

    `right_from` is L + 1 for a row that the full model gets wrong; it needs labels.
    """

    name = "prediction_depth"
    title = "Final and right"
    about = (
        "The depth from which each prediction is final, against the depth from which it is right; "
        "one more than the last depth means never."
    )
    kind = "table"
    keep = 2**25

    def __init__(self) -> None:
        super().__init__()
        self.labeled = False

    def update(self, observation: Observation) -> None:
        p, targets = observation.predictions, observation.targets
        self.rows += p.top.shape[1]
        right = torch.full_like(p.top[0], -1)
        if targets is not None:
            self.labeled = True
            right = torch.where(p.labeled, holds_from(p.top == targets).int(), -1)
        sample = observation.row_sample.to(right.device)
        self.kept.add(torch.stack([sample, saturation_depth(p.top), right], 1))

    def compute(self) -> Result:
        sample, final, right = self.kept.values().astype(np.int64).T
        arrays = {"final_from": self.depth_of(final), "sample": sample}
        if self.labeled:
            right = np.where(right < 0, right, self.depth_of(right))
            arrays["right_from"] = np.ma.masked_less(right, 0) if (right < 0).any() else right
        cut = self.kept.rows < self.rows
        return Result(
            name=self.name,
            kind=self.kind,
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
class TopMargin(_Decision):
    """Top-1 minus top-2 logit, mean over rows, with quantiles."""

    reads = frozenset({"margin"})
    name = "margin"
    title = "Margin"
    about = "How far the top class is ahead of the second; boxes show the middle half of samples."
    better = "higher"

    def update(self, observation: Observation) -> None:
        margin = observation.predictions.margin
        self.sums.add(margin=margin.sum(1, dtype=torch.float64))
        self.rows += margin.shape[1]
        self.kept.add(margin.T)

    def compute(self) -> Result:
        return self.over_depths(
            {"value": self.sums.array("margin") / self.rows},
            beside=self.kept.quantiles(),
            labels={"value": "margin, top-1 minus top-2 (logit)"},
            meta={"rows": self.rows, "quantile_rows": self.kept.rows},
        )


@checked
def effective_depth(
    accuracy: np.ndarray, epsilon: Annotated[float, Setting(least=0, most=1)]
) -> tuple[int, int]:
    """(absolute, relative): smallest l with `acc_l >= 1 - eps`, or `acc_l >= acc_L - eps`; else L.

    `accuracy` holds depths 0..L.
    """
    if np.ndim(accuracy) != 1 or not len(accuracy):
        raise SettingError(
            f"accuracy has shape {np.shape(accuracy)}; give one number for each depth from 0"
        )
    last = len(accuracy) - 1

    def first(enough: float) -> int:
        # Allow for rounding: in floating point, 1 - 0.9 is a little less than 0.1.
        found = np.flatnonzero(np.asarray(accuracy) >= enough - 1e-12)
        return int(found[0]) if len(found) else last

    return first(1 - epsilon), first(float(accuracy[-1]) - epsilon)


@register_metric
class EffectiveDepth(_Decision):
    """Epsilon-effective depth, absolute and relative to the full model, for several epsilon."""

    name = "effective_depth"
    title = "Depth needed"
    about = "The fewest blocks that lose no more than epsilon of accuracy."
    kind = "table"
    needs = LABELS

    epsilons: ClassVar[tuple[float, ...]] = (0.0, 0.01, 0.02, 0.05, 0.1)

    def update(self, observation: Observation) -> None:
        p = observation.predictions
        self.sums.add(right=((p.top == observation.targets) & p.labeled).sum(1))
        self.rows += int(p.labeled.sum())

    def compute(self) -> Result:
        accuracy = self.sums.array("right") / self.rows
        found = self.depth_of(np.array([effective_depth(accuracy, e) for e in self.epsilons]))
        return Result(
            name=self.name,
            kind=self.kind,
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
