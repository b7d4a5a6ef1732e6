"""AP50 of every decoder layer of a detector."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from everydepth.errors import LabelError
from everydepth.results.result import Result
from everydepth.tracing.metric import BatchMetric, register_metric
from everydepth.tracing.metrics.predictive import LABELS
from everydepth.tracing.observation import Observation
from everydepth.tracing.sums import DEPTH, array

IOU = 0.5
MOST = 100  # detections counted per image
RECALLS = np.linspace(0, 1, 101)  # at which precision is read


@register_metric
class AP50(BatchMetric):
    """Mean over classes of the average precision at an overlap of one half.

    Labels are one mapping per image with `class_labels` and `boxes` (center x, center y, width,
    height, as shares of the image). The last class of the head means "no object".
    """

    name = "ap50"
    title = "AP50"
    about = "Average precision of the boxes predicted by each decoder layer."
    better = "higher"
    section = "prediction"
    group = "detection"
    needs = LABELS
    tasks = frozenset({"detection"})

    def __init__(self) -> None:
        # One (class, score, hit) row per detection and depth.
        self.found: list[list[np.ndarray]] = []
        self.truth: dict[int, int] = {}

    def update(self, observation: Observation) -> None:
        labels = observation.states.batch["labels"]
        if not self.found:
            self.found = [[] for _ in range(observation.depth + 1)]
        images = [_truth(label) for label in labels]
        for classes, _ in images:
            for c in classes.tolist():
                self.truth[c] = self.truth.get(c, 0) + 1
        for depth, found in enumerate(self.found):
            h = observation.states.h[depth]
            logits = observation.states.logits(depth)
            boxes = observation.stream.extras(h, depth, observation.states.batch)["pred_boxes"]
            chance, kind = logits.float().softmax(-1)[..., :-1].max(-1)
            for image, (classes, real) in enumerate(images):
                found.append(_judged(chance[image], kind[image], boxes[image], classes, real))

    def compute(self) -> Result:
        if not self.truth:
            return self.gap("the images have no objects")
        value = np.empty(len(self.found))
        for depth, parts in enumerate(self.found):
            rows = np.concatenate(parts)
            value[depth] = np.mean([average_precision(rows, c, n) for c, n in self.truth.items()])
        return self.over_depths(
            {"value": value},
            labels={"depth": "decoder layer", "value": "AP50"},
            meta={"objects": sum(self.truth.values()), "classes": len(self.truth), "unit": DEPTH},
        )


def _truth(label: Any) -> tuple[Tensor, Tensor]:
    try:
        return label["class_labels"], _corners(label["boxes"].float())
    except (KeyError, TypeError) as error:
        raise LabelError(
            f"a label is {type(label).__name__} without 'class_labels' and 'boxes' ({error}); give "
            "one mapping per image, boxes as (center x, center y, width, height) from 0 to 1"
        ) from error


def _judged(chance: Tensor, kind: Tensor, boxes: Tensor, classes: Tensor, real: Tensor) -> Any:
    """(detection, 3): class, score, and whether it is the first to hit an object of its class."""
    order = chance.argsort(descending=True, stable=True)[:MOST]
    overlap = array(iou(_corners(boxes[order].float()), real.to(boxes.device)))
    chance_, kind_, classes_ = array(chance[order]), array(kind[order]), array(classes)
    free = np.ones(len(classes_), dtype=bool)
    hit = np.zeros(len(order))
    for i in range(len(order)):
        allowed = np.where(free & (classes_ == kind_[i]), overlap[i], -1.0)
        if len(allowed) and allowed.max() >= IOU:
            free[allowed.argmax()] = False
            hit[i] = 1
    return np.stack([kind_, chance_, hit], 1)


def average_precision(rows: np.ndarray, kind: int, objects: int) -> float:
    """Mean over 101 recalls of the best precision at that recall or above."""
    mine = rows[rows[:, 0] == kind]
    hits = mine[np.argsort(-mine[:, 1], kind="stable"), 2]
    right = np.cumsum(hits)
    precision = right / np.arange(1, len(hits) + 1)
    best = np.maximum.accumulate(precision[::-1])[::-1]
    place = np.searchsorted(right / objects, RECALLS, side="left")
    return float(np.append(best, 0.0)[np.minimum(place, len(best))].mean())


def _corners(boxes: Tensor) -> Tensor:
    center, size = boxes[..., :2], boxes[..., 2:]
    return torch.cat([center - size / 2, center + size / 2], -1)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """(boxes of a, boxes of b) intersection over union of boxes given by their corners."""
    low = torch.maximum(a[:, None, :2], b[None, :, :2])
    high = torch.minimum(a[:, None, 2:], b[None, :, 2:])
    common = (high - low).clamp(min=0).prod(-1)
    area = [(x[:, 2:] - x[:, :2]).prod(-1) for x in (a, b)]
    return common / (area[0][:, None] + area[1] - common).clamp(min=1e-12)
