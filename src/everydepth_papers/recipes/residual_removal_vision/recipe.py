"""Residual Relay on images: one network trained for each layer whose skips are removed."""

from __future__ import annotations

from everydepth_papers.evidence import Preset, Recipe, later, published
from everydepth_papers.evidence.networks import hub_models

PUBLISHED = published(__file__)

SMALL = {
    "name": "Fashion-MNIST-ViT",
    "task": "images",
    "data": "fashion-mnist",
    "patch": 14,
    "width": 64,
    "depth": 4,
    "rows": 240,
    "before": 2000,
    "before_epochs": 6,
    "test": 500,
    "noise": 0.05,
    "epochs": 80,
    "batch": 25,
    "lr": 5e-4,
    "watch": 5,
}
SMOKE = {
    **SMALL,
    "name": "digits-ViT",
    "data": "digits",
    "patch": 4,
    "width": 16,
    "depth": 2,
    "rows": 60,
    "before": 60,
    "before_epochs": 1,
    "test": 30,
    "epochs": 2,
    "watch": 1,
}
FINE = {"task": "hub", "noise": 0.01, "epochs": 70, "batch": 16, "lr": 2e-5, "watch": 5}
PAPER = (
    {
        "name": "CIFAR10-ViT-Base",
        "data": "uoft-cs/cifar10",
        "model": "google/vit-base-patch16-224",
        "of_class": 9,
    },
    {
        "name": "CIFAR100-TinyViT",
        "data": "uoft-cs/cifar100",
        "label": "fine_label",
        "model": "WinKawaks/vit-tiny-patch16-224",
        "of_class": 16,
    },
    {
        "name": "Places365Mini-BEiT",
        "data": "dpdl-benchmark/places365-mini-sample-hard",
        "model": "microsoft/beit-base-patch16-224",
        "of_class": 9,
    },
    {
        "name": "UTK-Face-DeiT",
        "data": "nlphuji/utk_faces",
        "model": "facebook/deit-base-patch16-224",
        "of_class": 2,
    },
)


RECIPE = Recipe(
    name="residual_removal_vision",
    title="Do skips carry memorization? A ViT trained without the skips of each layer",
    paper="residual",
    item="Figures 1, 2, 5-10, 14-26, Table 2 (vision)",
    presets={
        "smoke": Preset(cells=(SMOKE,), cost="5 s"),
        "small": Preset(cells=(SMALL,), seeds=3, cost="3 min, 1 core", needs=("fashion-mnist",)),
        "paper": Preset(
            cells=tuple({**FINE, **one} for one in PAPER),
            cost="4 networks x 13 fine-tunings of up to 70 epochs; about 20 GPU days",
            needs=tuple(str(one["data"]) for one in PAPER),
            models=hub_models(PAPER, "ImageClassification"),
            memory_gib=12.0,
            launch="accelerate launch",
        ),
    },
    cell=later("label_noise:cell"),
    rows=later("residual_claims:rows", query=PUBLISHED["query_std"]),
    figure=later("residual_claims:figure"),
    about=(
        "Small: a ViT of 4 blocks, first trained on 2,000 clean images, then, as the paper does "
        "with its pretrained networks, on 240 others of which 5 % have a wrong label, until all "
        "training labels are fitted (at most 80 epochs). The learning rate was chosen on the "
        "untouched network with another seed, for reaching 100 %; nothing was tuned for a claim. "
        "The paper flips 1 % of one class. Its figures have no printed numbers, so a row says "
        "what the text claims. UTK-Face is named by its copy on the hub that we know of."
    ),
)
