"""Aligned training of a detector's decoder, AP50 per layer: Figure 18."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, over_seeds, published
from everydepth_papers.evidence.figures import band
from everydepth_papers.evidence.rows import holds_in, numbers, paired, where
from everydepth_papers.premise import Premise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PUBLISHED = published(__file__)
DETECTS = Premise(
    test="AP50 of the better network's last layer",
    value=lambda *case: max(r["ap50"][-1] for r in case),
    least=0.5,
    failing="inconclusive",
)
BOX, OVERLAP = 5, 2  # weights of the two box losses, as in DETR
NOTHING = 0.1  # weight of the class "no object", as in DETR


def build(settings: Cell) -> Any:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    tiny: dict[str, Any] = {"num_channels": 1, "embedding_size": 16, "hidden_sizes": [32, 64]}
    tiny |= {"depths": [1, 1], "layer_type": "basic", "out_features": ["stage2"]}
    large = settings["width"] == 256
    width = settings["width"]
    return DetrForObjectDetection(
        DetrConfig(
            num_channels=3 if large else 1,
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=ResNetConfig(out_features=["stage4"])
            if large
            else ResNetConfig(**tiny),
            num_queries=settings["queries"],
            num_labels=settings["classes"],
            d_model=width,
            encoder_layers=settings["encoder"],
            decoder_layers=settings["depth"],
            encoder_attention_heads=8 if large else 4,
            decoder_attention_heads=8 if large else 4,
            encoder_ffn_dim=2048 if large else width,
            decoder_ffn_dim=2048 if large else width,
            dropout=0.1 if large else 0.0,
        )
    )


def scenes(rows: int, size: int, seed: int) -> list[dict[str, Any]]:
    """Batches of gray images, each with one square or disc on noise, and its class and box."""
    import torch

    random = np.random.default_rng(seed)
    images = random.normal(0, 0.05, (rows, 1, size, size)).astype(np.float32)
    labels: list[dict[str, Any]] = []
    for image in images:
        side = int(random.integers(3 * size // 8, 5 * size // 8 + 1))
        x, y = random.integers(0, size - side, 2)
        kind = int(random.integers(2))
        up, across = np.mgrid[:side, :side] - (side - 1) / 2
        shape = up**2 + across**2 <= (side / 2) ** 2 if kind else np.ones((side, side), bool)
        image[0, y : y + side, x : x + side][shape] += 0.5 if kind else 1.0
        box = [(x + side / 2) / size, (y + side / 2) / size, side / size, side / size]
        boxes = torch.tensor([box], dtype=torch.float32)
        labels.append({"class_labels": torch.tensor([kind]), "boxes": boxes})
    pixels = torch.from_numpy(images)
    return [
        {"pixel_values": pixels[i : i + 32], "labels": labels[i : i + 32]}
        for i in range(0, rows, 32)
    ]


def coco(settings: Cell, split: str) -> Any:
    """COCO from the hub at one size, in batches."""
    import datasets
    import torch
    from torch.utils.data import DataLoader

    size = settings["size"]
    rows: Any = datasets.load_dataset(settings["data"], split=split)

    def batch(items: list[dict[str, Any]]) -> dict[str, Any]:
        images, labels = [], list[dict[str, Any]]()
        for item in items:
            picture = item["image"].convert("RGB")
            corners = torch.tensor(item["objects"]["bbox"]).view(-1, 4)
            corners = corners / torch.tensor([*picture.size, *picture.size])
            boxes = torch.cat([corners.view(-1, 2, 2).mean(1), corners[:, 2:] - corners[:, :2]], 1)
            kinds = torch.tensor(item["objects"]["category"]).long()
            labels.append({"class_labels": kinds, "boxes": boxes})
            pixels = np.asarray(picture.resize((size, size)), dtype=np.float32) / 127.5 - 1
            images.append(torch.from_numpy(pixels).permute(2, 0, 1))
        return {"pixel_values": torch.stack(images), "labels": labels}

    return DataLoader(rows, batch_size=16, shuffle=split == "train", collate_fn=batch)


def detection_loss(classes: int) -> Callable[..., Any]:
    """DETR's own loss of one layer after the best matching of queries and objects, one image a row.

    Rows are weighted so that their mean is DETR's loss of the batch: boxes count alike, and so do
    classes, of which "no object" counts a tenth.
    """
    import torch
    from transformers.loss.loss_for_object_detection import HungarianMatcher, ImageLoss

    matcher = HungarianMatcher(class_cost=1, bbox_cost=BOX, giou_cost=OVERLAP)
    parts = ImageLoss(
        matcher=matcher, num_classes=classes, eos_coef=NOTHING, losses=["labels", "boxes"]
    )

    def loss(logits: Any, labels: Any, context: Mapping[str, Any]) -> Any:
        each = [
            parts({"logits": z[None], "pred_boxes": boxes[None]}, [label])
            for z, boxes, label in zip(logits, context["pred_boxes"], labels, strict=True)
        ]
        kinds, near, overlap = (
            torch.stack([one[name] for one in each])
            for name in ("loss_ce", "loss_bbox", "loss_giou")
        )
        objects = kinds.new_tensor([len(label["class_labels"]) for label in labels])
        queries = objects + NOTHING * (logits.shape[1] - objects)
        by_object, by_query = (x / x.sum().clamp(min=1) * len(x) for x in (objects, queries))
        return by_query * kinds + by_object * (BOX * near + OVERLAP * overlap)

    return loss


def cell(settings: Cell, seed: int, folder: Path) -> Mapping[str, Any]:
    import torch

    import everydepth as ed

    torch.manual_seed(seed)
    model = build(settings)
    if settings["data"] == "synthetic":
        train = scenes(settings["rows"], settings["size"], 2 * seed)
        test = scenes(settings["rows"] // 4, settings["size"], 2 * seed + 1)
    else:
        train, test = (coco(settings, split) for split in ("train", "val"))
        _pretrained_backbone(model)
    # Every layer's loss at every step, as DETR's auxiliary losses are.
    aligned = ed.aligned("uniform", alternate=False)
    long = settings["epochs"] > 20
    ed.fit(
        ed.EveryDepth(
            model.train(),
            aligned if settings["objective"] == "aligned" else ed.end_to_end(),
            criterion=detection_loss(settings["classes"]),
        ),
        train,
        epochs=settings["epochs"],
        lr=settings["lr"],
        clip=settings["clip"],
        warmup=0.1,
        seed=seed,
        run=folder / "training" if long else None,
        resume=long,
        progress=False,
    )
    return {"ap50": numbers(ed.trace(model, test, "ap50", progress=False)["ap50"])}


def _pretrained_backbone(model: Any) -> None:
    from transformers import ResNetBackbone, ResNetModel

    own = next(m for m in model.modules() if isinstance(m, ResNetBackbone))
    state = ResNetModel.from_pretrained("microsoft/resnet-50").state_dict()
    own.load_state_dict(
        {k: v for k, v in state.items() if not k.startswith("pooler")}, strict=False
    )


def rows(results: Sequence[Finished]) -> list[Row]:
    of = {name: where(results, objective=name) for name in ("standard", "aligned")}
    depth = results[0].cell["depth"]
    found = [
        over_seeds(
            f"AP50 of decoder layer {layer}, {name}", None, [r["ap50"][layer] for r in group]
        )
        for name, group in of.items()
        for layer in range(1, depth + 1)
    ]
    both = paired(of["aligned"], of["standard"])
    return [
        *found,
        holds_in(
            "Fig. 18: aligned losses raise AP50 of the last layer",
            PUBLISHED["critical"],
            both,
            lambda a, s: a["ap50"][-1] > s["ap50"][-1],
            premises=[DETECTS],
        ),
        holds_in(
            "Fig. 18: an aligned layer below the last reaches the last layer of standard training",
            PUBLISHED["layers"],
            both,
            lambda a, s: max(a["ap50"][1:-1]) >= s["ap50"][-1],
            premises=[DETECTS],
        ),
        holds_in(
            "Fig. 18: aligned training raises AP50 at every layer below the last",
            PUBLISHED["layers"],
            both,
            lambda a, s: all(np.greater(a["ap50"][1:-1], s["ap50"][1:-1])),
            premises=[DETECTS],
        ),
    ]


def figure(results: Sequence[Finished]) -> Figure:
    from matplotlib.figure import Figure

    page = Figure(figsize=(5, 3.5), layout="constrained")
    axis = page.subplots()
    for name in ("standard", "aligned"):
        group = where(results, objective=name)
        values = [r["ap50"][1:] for r in group]
        band(axis, range(1, len(values[0]) + 1), values, name)
    axis.set(xlabel="decoder layer", ylabel="AP50")
    axis.legend()
    return page


SMALL: Cell = {
    "data": "synthetic", "rows": 960, "size": 32, "classes": 2, "queries": 4, "width": 64,
    "encoder": 1, "depth": 4, "epochs": 36, "lr": 1.5e-3, "clip": 1.0,
}  # fmt: skip
SMOKE: Cell = {**SMALL, "rows": 64, "width": 16, "depth": 2, "epochs": 1}
PAPER: Cell = {
    **SMALL, "data": "detection-datasets/coco", "size": 512, "classes": 80, "queries": 100,
    "width": 256, "encoder": 6, "depth": 6, "epochs": 150, "lr": 1e-4, "clip": 0.1,
}  # fmt: skip


def cells(settings: Cell) -> list[Cell]:
    return [{**settings, "objective": name} for name in ("standard", "aligned")]


RECIPE = Recipe(
    name="tracing_detr",
    title="Aligned training of a DETR decoder, AP50 per layer",
    paper="tracing",
    item="Figure 18",
    presets={
        "smoke": Preset(cells=cells(SMOKE), cost="1 s"),
        "small": Preset(cells=cells(SMALL), seeds=3, cost="6 min, 1 core"),
        "paper": Preset(
            cells=cells(PAPER),
            cost="days on 8 GPUs",
            needs=("detection-datasets/coco",),
            models={"DETR-R50": lambda: build(PAPER)},
            memory_gib=20.0,
            launch="accelerate launch --multi_gpu",
        ),
    },
    cell=cell,
    rows=rows,
    figure=figure,
    about=(
        "Small: synthetic images of 32 x 32 with one square or disc each, made here; a DETR with a "
        "small ResNet, 1 encoder and 4 decoder layers, 36 epochs of 960 images (after 12, two of "
        "three seeds were below an AP50 of 0.5). Aligned is the loss of every decoder layer with "
        "equal weights at every step, which is what DETR calls auxiliary losses. Paper: DETR-R50 "
        "on COCO at a fixed size; the paper gives no settings."
    ),
)
