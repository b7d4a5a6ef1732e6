"""AP50 against a brute-force version, and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.zoo import ENTRIES

import everydepth as ed
from everydepth.errors import LabelError
from everydepth.tracing.metrics.detection import average_precision, iou


def overlap(a: list[float], b: list[float]) -> float:
    """Of two boxes given by center and size."""
    ax, ay, aw, ah = a
    bx, by, bw, bh = b
    width = min(ax + aw / 2, bx + bw / 2) - max(ax - aw / 2, bx - bw / 2)
    height = min(ay + ah / 2, by + bh / 2) - max(ay - ah / 2, by - bh / 2)
    if width <= 0 or height <= 0:
        return 0.0
    return width * height / (aw * ah + bw * bh - width * height)


def brute_ap50(images: list[dict[str, Any]], classes: set[int]) -> float:
    """For every class: match greedily by score, then the area under the best precision."""
    scores = []
    for kind in classes:
        found = []
        total = 0
        for number, image in enumerate(images):
            total += sum(c == kind for c, _ in image["truth"])
            mine = [(s, box) for s, c, box in image["found"] if c == kind]
            found += [(s, number, box) for s, box in mine]
        if total == 0:
            continue
        used: set[tuple[int, int]] = set()
        hits = []
        for _, number, box in sorted(found, key=lambda f: -f[0]):
            best, where = 0.0, None
            for i, (c, real) in enumerate(images[number]["truth"]):
                if c == kind and (number, i) not in used and overlap(box, real) > best:
                    best, where = overlap(box, real), i
            if best >= 0.5 and where is not None:
                used.add((number, where))
            hits.append(best >= 0.5)
        points = []
        for recall in np.linspace(0, 1, 101):
            right, best_precision = 0, 0.0
            for i, hit in enumerate(hits):
                right += hit
                if right / total >= recall:
                    best_precision = max(best_precision, right / (i + 1))
            points.append(best_precision)
        scores.append(np.mean(points))
    return float(np.mean(scores))


@torch.no_grad()
def test_ap50_of_every_decoder_layer_agrees_with_brute_force() -> None:
    model, batch = ENTRIES["Detr-plain"].make()
    stream = ed.as_stream(model)
    random = torch.Generator().manual_seed(0)
    pixels = torch.randn(6, 3, 64, 64, generator=random)
    states = stream.observe({"pixel_values": pixels})
    labels = []
    for i in range(6):  # objects near what some depth finds, so that there are hits
        boxes = stream.extras(states.h[i % len(states)], i % len(states), {})["pred_boxes"][i, :3]
        moved = (boxes + 0.02 * torch.randn(boxes.shape, generator=random)).clamp(0.05, 0.95)
        kinds = states.logits(i % len(states))[i, :3, :-1].argmax(-1)
        labels.append({"class_labels": kinds, "boxes": moved})
    data = [
        {"pixel_values": pixels[:4], "labels": labels[:4]},
        {"pixel_values": pixels[4:], "labels": labels[4:]},
    ]
    t = ed.trace(model, data, ["ap50"], progress=False)
    classes = {int(c) for label in labels for c in label["class_labels"]}
    for depth in range(len(states)):
        chance, kind = states.logits(depth).softmax(-1)[..., :-1].max(-1)
        boxes = stream.extras(states.h[depth], depth, {})["pred_boxes"]
        images = [
            {
                "truth": list(
                    zip(label["class_labels"].tolist(), label["boxes"].tolist(), strict=True)
                ),
                "found": list(
                    zip(chance[i].tolist(), kind[i].tolist(), boxes[i].tolist(), strict=True)
                ),
            }
            for i, label in enumerate(labels)
        ]
        assert t["ap50"][depth] == pytest.approx(brute_ap50(images, classes), abs=1e-5)
    assert t["ap50"].max() > 0.05
    assert batch["pixel_values"].shape[1:] == pixels.shape[1:]


def test_average_precision_by_hand() -> None:
    # Three objects; hits at ranks 1 and 3: precision 1 up to recall 1/3, 2/3 up to 2/3.
    rows = np.array([[0, 0.9, 1], [0, 0.8, 0], [0, 0.7, 1], [1, 0.99, 1]])
    assert average_precision(rows, 0, 3) == pytest.approx((34 * 1 + 33 * 2 / 3) / 101)
    assert average_precision(rows, 2, 3) == 0.0


def test_overlap_of_boxes() -> None:
    a = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    b = torch.tensor([[0.5, 0.0, 1.5, 1.0], [2.0, 2.0, 3.0, 3.0]])
    assert iou(a, b)[0].tolist() == pytest.approx([1 / 3, 0.0])


def test_labels_of_another_form_are_refused() -> None:
    model, batch = ENTRIES["Detr-plain"].make()
    data = [{**batch, "labels": [{"boxes": torch.zeros(1, 4)}] * 3}]
    with pytest.raises(LabelError, match="without 'class_labels' and 'boxes'"):
        ed.trace(model, data, ["ap50"], progress=False)


def test_images_without_objects_leave_a_gap() -> None:
    model, batch = ENTRIES["Detr-plain"].make()
    nothing = {"class_labels": torch.zeros(0, dtype=torch.long), "boxes": torch.zeros(0, 4)}
    t = ed.trace(model, [{**batch, "labels": [nothing] * 3}], ["ap50"], progress=False)
    assert t.result("ap50").note == "the images have no objects"
