"""How good the predictions of every depth are."""

from __future__ import annotations

from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from everydepth.results.build import scalars
from everydepth.results.result import Result
from everydepth.stream import TOKEN_TASKS, WORD_TASKS, Task
from everydepth.tracing.metric import BatchMetric, Need, register_metric
from everydepth.tracing.observation import Observation
from everydepth.tracing.predictions import Predictions
from everydepth.tracing.sums import array

CLASSES: frozenset[Task] = frozenset(("classification", *TOKEN_TASKS))
NUMBERS: frozenset[Task] = frozenset({"regression"})
LABELS: frozenset[Need] = frozenset({"labels"})


class _Quality(BatchMetric):
    section = "prediction"
    group = "prediction"
    needs = LABELS
    tasks = CLASSES
    some_depths = True


class _Mean(_Quality):
    """The mean over labeled rows of one value per depth, summed in float64."""

    label: ClassVar[str]

    def values(self, p: Predictions, targets: Tensor) -> Tensor:
        """One value per depth and row: by default the only field that it reads."""
        (name,) = self.reads
        return p.field(name)

    def update(self, observation: Observation) -> None:
        p = observation.predictions
        values = self.values(p, cast(Tensor, observation.targets))[:, p.labeled].double()
        self.sums.add(total=values.sum(1), squares=values.square().sum(1))
        self.rows += values.shape[1]

    def finish(self, mean: np.ndarray) -> np.ndarray:
        return mean

    def slope(self, mean: np.ndarray) -> np.ndarray:
        """The derivative of `finish`, which scales the standard error."""
        return np.ones_like(mean)

    def compute(self) -> Result:
        total = self.sums.array("total")
        mean = total / self.rows
        value = self.finish(mean)
        beside: dict[str, np.ndarray] = {}
        if self.drawn is not None:
            error = self.drawn.error(total, self.sums.array("squares"), self.rows)
            beside["standard_error"] = error * self.slope(mean)
        bad = self.where(~np.isfinite(value))
        return self.over_depths(
            {"value": value},
            beside=beside,
            labels={"value": self.label},
            meta={"rows": self.rows},
            note=f"not finite at depth {bad}" if bad else None,
        )


@register_metric
class Accuracy(_Mean):
    """Share of rows whose predicted class is the label."""

    reads = frozenset({"top"})
    name = "accuracy"
    title = "Accuracy"
    about = "Accuracy, if the network stopped at this depth and used the shared readout."
    unit = "share"
    better = "higher"
    label = "accuracy"
    tasks = CLASSES - {"causal_lm"}

    def values(self, p: Predictions, targets: Tensor) -> Tensor:
        return p.top == targets


@register_metric
class NextTokenAccuracy(Accuracy):
    """Share of tokens whose successor is predicted."""

    name = "next_token_accuracy"
    title = "Next-token accuracy"
    about = "Next-token accuracy, if the network stopped at this depth and used the shared readout."
    label = "next-token accuracy"
    tasks = frozenset({"causal_lm"})


@register_metric
class F1(_Quality):
    """Harmonic mean of precision and recall: for two classes, of class 1; else the class mean.

    It is GLUE's metric for MRPC and QQP, whose classes are imbalanced.
    """

    reads = frozenset({"top"})
    name = "f1"
    title = "F1"
    about = "F1, if the network stopped at this depth and used the shared readout."
    unit = "share"
    better = "higher"
    tasks = frozenset({"classification"})
    default = False

    def update(self, observation: Observation) -> None:
        p, classes = observation.predictions, observation.outputs
        top = p.top[:, p.labeled].long()
        labels = cast(Tensor, observation.targets)[p.labeled].long().expand_as(top)
        right = (top == labels).double()
        one = torch.ones_like(right)
        counts = [_binned(top, right, classes), *(_binned(i, one, classes) for i in (top, labels))]
        self.sums.add(counts=torch.stack(counts))  # (right, predicted, actual) x depth x class
        self.rows += top.shape[1]

    def compute(self) -> Result:
        right, predicted, actual = self.sums.array("counts")
        f1 = 2 * right / np.maximum(predicted + actual, 1)
        binary = f1.shape[1] == 2
        seen = actual[0] > 0
        value = f1[:, 1] if binary else f1[:, seen].mean(1)
        return self.over_depths(
            {"value": value},
            beside={"by_class": f1},
            labels={"value": "F1 of class 1" if binary else "F1, mean over classes"},
            meta={"rows": self.rows},
        )


def _binned(places: Tensor, values: Tensor, bins: int) -> Tensor:
    """(depth, bin): the sum of the values at the places of each bin."""
    return values.new_zeros(len(places), bins).scatter_add_(1, places, values)


@register_metric
class Loss(_Mean):
    """Mean cross-entropy of every depth; for language models the negative log-likelihood."""

    reads = frozenset({"loss"})
    name = "loss"
    title = "Loss"
    about = "Cross-entropy of the prediction read out at each depth; lower is better."
    unit = "nat"
    better = "lower"
    label = "cross-entropy (nat)"


@register_metric
class Perplexity(Loss):
    """`exp` of the mean negative log-likelihood."""

    name = "perplexity"
    title = "Perplexity"
    about = "The number of equally likely tokens with the same uncertainty, at each depth."
    unit = ""
    label = "perplexity"
    tasks = WORD_TASKS

    def finish(self, mean: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.exp(mean)

    def slope(self, mean: np.ndarray) -> np.ndarray:
        return self.finish(mean)


@register_metric
class Top5(_Mean):
    """Share of rows whose label is among the top five classes."""

    reads = frozenset({"rank"})
    name = "top5"
    title = "Top-5 accuracy"
    about = "Top-5 accuracy, if the network stopped at this depth and used the shared readout."
    unit = "share"
    better = "higher"
    label = "top-5 accuracy"

    def values(self, p: Predictions, targets: Tensor) -> Tensor:
        return p.rank < 5


@register_metric
class PredictionError(_Mean):
    """`||softmax(z) - onehot(y)||`."""

    reads = frozenset({"error"})
    name = "prediction_error"
    title = "Distance to the label"
    about = "Norm of the difference between predicted probabilities and the label."
    better = "lower"
    label = "prediction error ‖softmax(z) - y‖"


@register_metric
class MeanSquaredError(_Mean):
    reads = frozenset({"loss"})
    name = "mse"
    title = "Mean squared error"
    about = "Mean squared error of each depth; lower is better."
    better = "lower"
    label = "mean squared error"
    tasks = NUMBERS


@register_metric
class MeanAbsoluteError(_Mean):
    reads = frozenset({"absolute"})
    name = "mae"
    title = "Absolute error"
    about = "Mean absolute error of each depth."
    better = "lower"
    label = "mean absolute error"
    tasks = NUMBERS


@register_metric
class SupError(_Quality):
    """`max_x ||f(x) - z_l(x)||`."""

    reads = frozenset({"error"})
    name = "sup_error"
    title = "Worst error"
    about = "The largest error over all samples."
    better = "lower"
    tasks = NUMBERS

    def __init__(self) -> None:
        super().__init__()
        self.worst: Tensor | None = None

    def update(self, observation: Observation) -> None:
        found = observation.predictions.error.amax(1)
        self.worst = found if self.worst is None else torch.maximum(self.worst, found)

    def compute(self) -> Result:
        assert self.worst is not None
        return self.over_depths(
            {"value": array(self.worst)}, labels={"value": "largest error over the data"}
        )


@register_metric
class Calibration(_Quality):
    """Expected calibration error: |confidence - accuracy|, averaged over bins of confidence."""

    reads = frozenset({"confidence", "top"})
    name = "calibration"
    title = "Calibration error"
    about = "Average difference between confidence and accuracy; at 0, confidence can be trusted."
    better = "lower"

    bins: ClassVar[int] = 15

    def update(self, observation: Observation) -> None:
        p = observation.predictions
        confidence = p.confidence[:, p.labeled].double()
        right = (p.top == observation.targets)[:, p.labeled].double()
        # Bins are (a, b], so that a confidence of exactly 1 is in the last one.
        bin_of = ((confidence * self.bins).ceil().long() - 1).clamp(0, self.bins - 1)
        parts = (torch.ones_like(confidence), confidence, right)
        self.sums.add(bins=torch.stack([_binned(bin_of, part, self.bins) for part in parts]))

    def compute(self) -> Result:
        count, confidence, right = self.sums.array("bins")
        return self.over_depths(
            {"value": np.abs(confidence - right).sum(1) / count.sum(1)},
            beside={
                "bin_count": count,
                "bin_confidence": confidence / np.maximum(count, 1),
                "bin_accuracy": right / np.maximum(count, 1),
            },
            labels={"value": "expected calibration error"},
            meta={"bins": self.bins},
        )


@register_metric
class Monotonicity(_Quality):
    """Whether the loss falls at every depth: rises of the mean, and the share of rows without."""

    reads = frozenset({"loss"})
    name = "monotonicity"
    title = "Does more depth always help?"
    about = "Where the loss rises with depth."
    kind = "scalar"
    tasks = CLASSES | NUMBERS

    def __init__(self) -> None:
        super().__init__()
        self.falling = 0

    def update(self, observation: Observation) -> None:
        p = observation.predictions
        loss = p.loss[:, p.labeled].double()
        self.sums.add(loss=loss.sum(1))
        self.rows += loss.shape[1]
        self.falling += int((loss.diff(dim=0) <= 0).all(0).sum())

    def compute(self) -> Result:
        mean = self.sums.array("loss") / self.rows
        if len(mean) == 1:
            return self.gap("a single depth has no other to compare with; it needs two or more")
        rise = np.diff(mean)
        worst = int(rise.argmax())
        largest = max(float(rise[worst]), 0.0)
        relative = largest / abs(mean[worst]) if largest and mean[worst] else 0.0
        return scalars(
            self.name,
            {
                "rises": float((rise > 0).sum()),
                "largest_rise": largest,
                "largest_relative_rise": float(relative),
                "monotone_share": self.falling / self.rows,
            },
            labels={
                "rises": "number of depths at which the mean loss rises",
                "largest_rise": "largest rise of the mean loss",
                "largest_relative_rise": "largest rise, relative to the loss before it",
                "monotone_share": "share of predictions whose own loss never rises",
            },
            meta={
                "monotone": bool((rise <= 0).all()),
                "largest_rise_at": int(self.depth_of(worst + 1)) if largest else None,
                "rows": self.rows,
            },
        )
