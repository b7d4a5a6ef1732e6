"""What recipes of Tracing Representations compute by themselves, against plain references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from everydepth_papers.evidence import Recipe, aligned_vision, find_recipe


def part(name: str, function: str) -> tuple[Recipe, Any]:
    """A recipe, and one of the functions beside it."""
    recipe, _ = find_recipe(name)
    return recipe, recipe.cell.__globals__[function]


def test_a_scene_has_its_object_where_the_box_says() -> None:
    _, scenes = part("tracing_detr", "scenes")
    batch = scenes(8, 32, seed=0)[0]
    for image, label in zip(batch["pixel_values"], batch["labels"], strict=True):
        x, y, width, height = (label["boxes"][0] * 32).tolist()
        rows, columns = np.nonzero(np.asarray(image[0]) > 0.3)
        assert abs(columns.min() - (x - width / 2)) <= 1
        assert abs(columns.max() + 1 - (x + width / 2)) <= 1
        assert abs(rows.min() - (y - height / 2)) <= 1
        assert abs(rows.max() + 1 - (y + height / 2)) <= 1


def test_the_loss_of_a_layer_is_the_one_of_detr_itself() -> None:
    recipe, build = part("tracing_detr", "build")
    settings = recipe.presets["smoke"].cells[0]
    model = build(settings).eval()
    batch = part("tracing_detr", "scenes")[1](8, 32, seed=1)[0]
    own = model(**batch)
    loss = part("tracing_detr", "detection_loss")[1](2)
    found = loss(own.logits, batch["labels"], {"pred_boxes": own.pred_boxes})
    assert found.shape == (8,)
    assert float(found.detach().mean()) == pytest.approx(float(own.loss.detach()), rel=1e-5)


def test_an_exit_through_own_heads_counts_the_first_confident_layer() -> None:
    import everydepth as ed

    recipe, _ = find_recipe("tracing_vision")
    settings = {**recipe.presets["smoke"].cells[0], "depth": 3}
    torch.manual_seed(0)
    model = aligned_vision.build(settings)
    net = ed.EveryDepth(model, ed.multi_classifier()).eval()
    rows = [
        {"pixel_values": torch.randn(1, 8, 8), "labels": torch.tensor(i % 10)} for i in range(12)
    ]
    # Head 1 is sure of class 3 for everybody, so all leave there.
    head: Any = net.heads["1"]
    torch.nn.init.zeros_(head.weight)
    head.bias.data = torch.nn.functional.one_hot(torch.tensor(3), 10) * 50.0
    found = aligned_vision.exits(net, rows, 12)
    assert found["leaving"] == [12, 0, 0]
    assert found["layers"] == 3.0
    assert found["accuracy"] == pytest.approx(1 / 12)
