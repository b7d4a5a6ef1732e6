"""Table 4: deep vision transformers from scratch, accuracy at every second layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from everydepth_papers.evidence import (
    Cell,
    Finished,
    Preset,
    Recipe,
    Row,
    both,
    later,
    over_seeds,
    published,
)
from everydepth_papers.evidence.rows import where

PUBLISHED = published(__file__)
SIZES = {"ViT-12": (12, 768, 12), "ViT-24": (24, 1024, 16)}


def build(settings: Cell) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    depth, width, heads = SIZES.get(settings["model"], (settings.get("depth"), 48, 3))
    return ViTForImageClassification(
        ViTConfig(
            image_size=settings["size"],
            patch_size=settings["patch"],
            num_channels=settings["channels"],
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            num_labels=settings["classes"],
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def rows(results: Sequence[Finished]) -> list[Row]:
    from everydepth_papers.evidence.every_depth import NAMES, last_gain, worst_fall

    found: list[Row] = []
    for model in dict.fromkeys(r.cell["model"] for r in results):
        printed = PUBLISHED.get(model, PUBLISHED["ViT-12"])
        for objective, name in NAMES.items():
            mine = where(results, objective=objective, model=model)
            last = len(mine[0]["accuracy"])
            for place, depth in enumerate(range(2, last + 1, 2)):
                values = [100 * r["accuracy"][depth - 1] for r in mine]
                # The paper's layers are set beside ours at the same share of the depth.
                share = (place + 1) * len(printed[name]) / (last // 2) - 1
                shown = printed[name][int(share)] if share == int(share) else None
                found.append(over_seeds(f"{model}, {name}, accuracy, layer {depth}", shown, values))
        found.append(last_gain(results, model, printed, "last layer"))
        found += worst_fall(results, model, model=model)
    return found


SMALL = {"model": "narrow ViT-12", "depth": 12, "batch": 64, "lr": 1e-3, "clip": 1.0}
IMAGENET = {
    "data": "ILSVRC/imagenet-1k",
    "size": 224,
    "patch": 16,
    "channels": 3,
    "classes": 1000,
    "epochs": 300,
    "batch": 1024,
    "lr": 1e-3,
    "decay": 0.05,
    "warmup": 0.03,
    "clip": 1.0,
}
RECIPE = Recipe(
    name="progressive_table4",
    title="Deep vision transformers from scratch, layer by layer",
    paper="progressive",
    item="Table 4",
    about=(
        "Small: 12 blocks of width 48 on CIFAR-10 in 16 patches, 200 steps of 64 images, set "
        "beside the paper's ViT-12 on ImageNet-1k; chance is 10 % here and 0.1 % there. Its "
        "learning rate and augmentation are lost; AdamW, 0.001 and crop, flip and rotation are "
        "ours."
    ),
    presets={
        "smoke": Preset(
            cells=both(
                {
                    **SMALL,
                    "depth": 4,
                    "data": "digits",
                    "channels": 1,
                    "classes": 10,
                    "size": 8,
                    "patch": 4,
                    "steps": 10,
                }
            ),
            cost="3 s",
        ),
        "small": Preset(
            cells=both(
                {
                    **SMALL,
                    "data": "cifar10",
                    "channels": 3,
                    "classes": 10,
                    "size": 32,
                    "patch": 8,
                    "steps": 200,
                    "test_rows": 2000,
                }
            ),
            seeds=3,
            cost="1.5 min, 1 core",
            needs=("cifar10",),
            memory_gib=2.0,
        ),
        "paper": Preset(
            cells=[c for model in SIZES for c in both({**IMAGENET, "model": model})],
            cost="8 GPUs of 80 GB for about two weeks",
            needs=("ILSVRC/imagenet-1k",),
            models={name: lambda name=name: build({**IMAGENET, "model": name}) for name in SIZES},
            memory_gib=40.0,
            launch="accelerate launch --multi_gpu --mixed_precision bf16",
        ),
    },
    cell=later("every_depth:trained_on_images", build=build),
    rows=rows,
    figure=later("every_depth:depth_figure", by=("model", "data")),
)
