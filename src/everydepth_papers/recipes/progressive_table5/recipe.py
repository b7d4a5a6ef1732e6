"""Table 5: a pretrained network fine-tuned, end-to-end against LPA, accuracy along the depth."""

from __future__ import annotations

from functools import partial
from typing import Any

from everydepth_papers.evidence import Cell, Preset, Recipe, both, later, published
from everydepth_papers.evidence.networks import unloaded

PUBLISHED = published(__file__)
HUB = {
    "ViT-Base": "facebook/deit-base-patch16-224",
    "ViT-Small": "facebook/deit-small-patch16-224",
}


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
        "Small: no pretrained vision transformer is available, so a CIFAR-10 ResNet-32 of 92.6 % "
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
        "full": Preset(
            cells=both(
                {
                    **TUNE,
                    "model": "resnet32",
                    "layers": 32,
                    "channels": 3,
                    "data": "cifar10",
                    "epochs": 3,
                }
            ),
            seeds=3,
            cost="about 3 h, 1 core",
            needs=("cifar10", "resnet-cifar10"),
            memory_gib=4.0,
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
    rows=later("every_depth:share_rows", printed=PUBLISHED, like="ViT-Base", item="Table 5"),
    figure=later("every_depth:depth_figure", by=("model", "data")),
)
