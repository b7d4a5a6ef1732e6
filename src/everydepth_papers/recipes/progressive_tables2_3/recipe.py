"""Tables 2 and 3, Figures 4 and 5: image classifiers, end-to-end against LPA, every depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, both, later, published
from everydepth_papers.evidence.networks import vit

if TYPE_CHECKING:
    from torch import nn

PUBLISHED = published(__file__)
DATA = {
    "C10": ("uoft-cs/cifar10", "cifar10"),
    "C100": ("uoft-cs/cifar100",),
    "FM": ("zalando-datasets/fashion_mnist", "fashion-mnist"),
}
LARGE_VIT = {"width": 192, "heads": 3, "size": 32, "patch": 4}
# The model a small one stands for.
LARGE = {"small vit": "vit-12", "small resnet": "resnet-18"}


def resnet(layers: int, classes: int) -> Any:
    """The standard one; the paper does not say whether its first layer was changed."""
    from transformers import ResNetConfig, ResNetForImageClassification

    depths = {18: [2, 2, 2, 2], 34: [3, 4, 6, 3]}[layers]
    config = ResNetConfig(
        num_channels=3,
        embedding_size=64,
        hidden_sizes=[64, 128, 256, 512],
        depths=depths,
        layer_type="basic",
        num_labels=classes,
    )
    return ResNetForImageClassification(config)


def build(settings: Cell) -> nn.Module:
    from everydepth.architectures.cifar_resnet import CifarResNet, CifarResNetConfig

    name, channels, classes = settings["model"], settings["channels"], settings["classes"]
    if name == "small resnet":
        config = CifarResNetConfig.of_depth(
            settings["layers"], width=8, num_channels=channels, num_labels=classes
        )
        return CifarResNet(config)
    if name == "small vit":
        seen = {"size": settings["size"], "patch": settings["patch"], "channels": channels}
        return vit(depth=settings["depth"], width=48, heads=3, **seen, classes=classes)
    if name.startswith("vit-"):
        return vit(depth=int(name[4:]), **LARGE_VIT, classes=classes)
    return resnet(int(name[7:]), classes)


def rows(results: Sequence[Finished]) -> list[Row]:
    from everydepth_papers.evidence.every_depth import depth_rows, statements, worst_fall

    found: list[Row] = []
    for model, data in dict.fromkeys((r.cell["model"], r.cell["data"]) for r in results):
        short = next((k for k, names in DATA.items() if data in names), data)
        printed = PUBLISHED.get(f"{LARGE.get(model, model)} {short}", {})
        what, mine = f"{model}, {short}", {"model": model, "data": data}
        found += depth_rows(results, what, printed, **mine)
        losses = printed.get("loss", {})
        found += depth_rows(results, what, losses, "loss", scale=1.0, **mine)
        found += worst_fall(results, what, **mine)
        last, early = ("Table 2", "Fig. 4") if "vit" in model else ("Table 3", "Fig. 5")
        found += statements(results, what, last=last, early=early, **mine)
    return found


VIT = {"model": "small vit", "depth": 6, "batch": 64, "lr": 2e-3, "clip": 1.0}
RESNET = {"model": "small resnet", "layers": 14, "batch": 64, "lr": 0.1, "optimizer": "sgd"}
FM = {"data": "fashion-mnist", "channels": 1, "classes": 10, "test_rows": 2000}
C10 = {"data": "cifar10", "channels": 3, "classes": 10, "test_rows": 2000}
DIGITS = {"data": "digits", "channels": 1, "classes": 10, "size": 8}


def paper_cells() -> list[Cell]:
    found: list[Cell] = []
    for model in ("vit-12", "vit-24", "resnet-18", "resnet-34"):
        for short, classes in (("C10", 10), ("C100", 100), ("FM", 10)):
            how = {"model": model, "data": DATA[short][0], "classes": classes, "channels": 3}
            how |= {"size": 32, "batch": 128}
            vits = {"epochs": 300, "lr": 1e-3, "decay": 0.05, "warmup": 0.03}
            resnets = {"epochs": 50, "lr": 0.1, "optimizer": "sgd", "warmup": 0}
            found += both(how | (vits if model.startswith("vit") else resnets))
    return found


RECIPE = Recipe(
    name="progressive_tables2_3",
    title="Image classifiers at every depth: end-to-end against LPA",
    paper="progressive",
    item="Tables 2 and 3, Figures 4 and 5",
    about=(
        "Small: a ViT of 6 blocks and width 48 (16 patches), six passes, and a ResNet-14 of widths "
        "8, 16, 32 on 14x14 images, one pass, set beside the paper's ViT-12 and ResNet-18. The "
        "paper's learning rates are lost; AdamW 0.001 (ViT; 0.002 small) and SGD 0.1 (ResNet) are "
        "ours. It says 300 epochs for all in App. I and 50 for ResNets in Sec. 5.2; the latter is "
        "used. After one pass the ViTs were below, and at, a linear classifier on the same rows. "
        "Published figures are accuracies of the last layer; those of depths below are only "
        "drawn."
    ),
    presets={
        "smoke": Preset(
            cells=[
                *both({**VIT, **DIGITS, "depth": 3, "patch": 4, "steps": 12}),
                *both({**RESNET, **DIGITS, "layers": 8, "steps": 6}),
            ],
            cost="5 s",
        ),
        "small": Preset(
            cells=[
                *both({**VIT, **FM, "size": 28, "patch": 7, "steps": 5600}),
                *both({**RESNET, **FM, "size": 14, "steps": 900}),
                *both({**VIT, **C10, "size": 32, "patch": 8, "steps": 4700}),
            ],
            seeds=3,
            cost="1 h, 1 core",
            needs=("fashion-mnist", "cifar10"),
            memory_gib=2.0,
        ),
        "paper": Preset(
            cells=paper_cells(),
            seeds=3,
            cost="about 15 GPU days on one A6000 (28 s an epoch for ViT-12, as printed)",
            needs=tuple(names[0] for names in DATA.values()),
            models={
                "ViT-12": lambda: vit(depth=12, **LARGE_VIT),
                "ViT-24": lambda: vit(depth=24, **LARGE_VIT),
                "ResNet-18": lambda: resnet(18, 10),
                "ResNet-34": lambda: resnet(34, 10),
            },
            memory_gib=8.0,
            launch="accelerate launch",
        ),
    },
    cell=later("every_depth:trained_on_images", build=build),
    rows=rows,
    figure=later("every_depth:depth_figure", by=("model", "data")),
)
