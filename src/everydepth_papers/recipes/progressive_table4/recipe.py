"""Table 4: deep vision transformers from scratch, accuracy at every second layer."""

from __future__ import annotations

from typing import Any

from everydepth_papers.evidence import Cell, Preset, Recipe, both, later, published
from everydepth_papers.evidence.networks import vit

PUBLISHED = published(__file__)
SIZES = {"ViT-12": (12, 768, 12), "ViT-24": (24, 1024, 16)}


def build(settings: Cell) -> Any:
    depth, width, heads = SIZES.get(settings["model"], (settings.get("depth"), 48, 3))
    fixed = {name: settings[name] for name in ("size", "patch", "channels", "classes")}
    return vit(depth=depth, width=width, heads=heads, **fixed)


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
        "Small: 12 blocks of width 48 on Fashion-MNIST in 16 patches, six passes (5,600 steps of "
        "64 images; by the rule of tracing_vision), set beside the paper's ViT-12 on ImageNet-1k; "
        "chance is 10 % here and 0.1 % there. A first run, 200 steps on CIFAR-10, ended at 29 %, "
        "below a linear classifier. The paper's "
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
                    "data": "fashion-mnist",
                    "channels": 1,
                    "classes": 10,
                    "size": 28,
                    "patch": 7,
                    "steps": 5600,
                    "test_rows": 2000,
                }
            ),
            seeds=3,
            cost="40 min, 1 core",
            needs=("fashion-mnist",),
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
    rows=later("every_depth:share_rows", printed=PUBLISHED, like="ViT-12", item="Table 4"),
    figure=later("every_depth:depth_figure", by=("model", "data")),
)
