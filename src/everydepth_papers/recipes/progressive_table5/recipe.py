"""Table 5: a pretrained network fine-tuned, end-to-end against LPA, accuracy along the depth."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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
from everydepth_papers.evidence.networks import unloaded
from everydepth_papers.evidence.rows import where

PUBLISHED = published(__file__)
HUB = {
    "ViT-Base": "facebook/deit-base-patch16-224",
    "ViT-Small": "facebook/deit-small-patch16-224",
}
SHARES = 6  # the paper prints six depths: 1/6, 2/6, ... of the network


def build(settings: Cell) -> Any:
    from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig

    if settings["model"] in HUB:
        from transformers import ViTForImageClassification

        return ViTForImageClassification.from_pretrained(HUB[settings["model"]])
    config = CifarResNetConfig.of_depth(
        settings["layers"], num_channels=settings["channels"], shortcut="pad", num_labels=10
    )
    model = CifarResNet(config)
    if settings["model"] == "resnet32":
        from safetensors.torch import load_file

        from everydepth_papers.evidence import data_folder

        weights = data_folder("resnet-cifar10") / "resnet32.safetensors"
        model.load_state_dict(load_file(weights))
    return model


def rows(results: Sequence[Finished]) -> list[Row]:
    from everydepth_papers.evidence.every_depth import NAMES, last_gain, worst_fall

    found: list[Row] = []
    for model in dict.fromkeys(r.cell["model"] for r in results):
        printed = PUBLISHED.get(model, PUBLISHED["ViT-Base"])
        for objective, name in NAMES.items():
            mine = where(results, objective=objective, model=model)
            last = len(mine[0]["accuracy"])
            for share in range(1, SHARES + 1):
                depth = max(1, round(share * last / SHARES))
                values = [100 * r["accuracy"][depth - 1] for r in mine]
                quantity = f"{model}, {name}, accuracy, block {depth} of {last}"
                found.append(over_seeds(quantity, printed[name][share - 1], values))
        found.append(last_gain(results, model, printed, "last block"))
        found += worst_fall(results, model, model=model)
    return found


TUNE = {"optimizer": "sgd", "lr": 0.02, "batch": 32, "warmup": 0.1}
IMAGENET = {
    "data": "ILSVRC/imagenet-1k",
    "size": 224,
    "epochs": 30,
    "batch": 1024,
    "lr": 1e-4,
    "decay": 0.05,
    "warmup": 0.03,
}
RECIPE = Recipe(
    name="progressive_table5",
    title="A pretrained network fine-tuned to be used at every depth",
    paper="progressive",
    item="Table 5",
    about=(
        "Small: no pretrained vision transformer is at hand, so a CIFAR-10 ResNet-32 of 92.6 % "
        "(15 blocks, trained end-to-end by others) is fine-tuned for 40 steps of 32 images and set "
        "beside ViT-Base at the same shares of the depth. The paper's learning rate is lost; 0.02 "
        "(SGD) and 0.0001 (AdamW) are ours. Its App. I calls ViT-Small a network of 24 layers and "
        "width 1024; the checkpoint it links has 12 layers and width 384, which is used."
    ),
    presets={
        "smoke": Preset(
            cells=both(
                {
                    **TUNE,
                    "model": "random",
                    "layers": 14,
                    "channels": 1,
                    "data": "digits",
                    "size": 8,
                    "steps": 6,
                    "rows": 300,
                }
            ),
            cost="4 s",
        ),
        "small": Preset(
            cells=both(
                {
                    **TUNE,
                    "model": "resnet32",
                    "layers": 32,
                    "channels": 3,
                    "data": "cifar10",
                    "steps": 40,
                    "test_rows": 1000,
                }
            ),
            seeds=3,
            cost="1.5 min, 1 core",
            needs=("cifar10", "resnet-cifar10"),
            memory_gib=2.0,
        ),
        "paper": Preset(
            cells=[c for model in HUB for c in both({**IMAGENET, "model": model})],
            cost="8 GPUs for about a day",
            needs=("ILSVRC/imagenet-1k", *HUB.values()),
            models={
                name: partial(unloaded, hub, "ImageClassification", num_labels=1000)
                for name, hub in HUB.items()
            },
            memory_gib=40.0,
            launch="accelerate launch --multi_gpu --mixed_precision bf16",
        ),
    },
    cell=later("every_depth:trained_on_images", build=build),
    rows=rows,
    figure=later("every_depth:depth_figure", by=("model", "data")),
)
