"""Similarity within and across the towers of a CLIP: Figures 22 and 23."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, over_seeds, published
from everydepth_papers.evidence.figures import band
from everydepth_papers.evidence.rows import holds_in, numbers
from everydepth_papers.premise import Premise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PUBLISHED = published(__file__)
SENTENCE = "this is a photo of a {}"
PAIRS = {
    "vision": "embedding_cos", "text": "embedding_cos_other", "cross": "embedding_cos_between"
}  # fmt: skip


def words(classes: Sequence[str]) -> Any:
    """(class, token) ids of the sentences, one token per word; the largest id ends a text."""
    import torch

    lines = [SENTENCE.format(name).split() for name in classes]
    known = {word: i for i, word in enumerate(sorted({w for line in lines for w in line}), start=1)}
    longest, end = max(map(len, lines)) + 1, len(known) + 1
    rows = [[known[w] for w in line] + [end] for line in lines]
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


def build(settings: Cell, ids: Any) -> Any:
    from transformers import CLIPConfig, CLIPModel

    sizes = {
        "hidden_size": settings["width"],
        "intermediate_size": 2 * settings["width"],
        "num_hidden_layers": settings["depth"],
        "num_attention_heads": 4,
    }
    end = int(ids.max())
    text = {"vocab_size": end + 1, "max_position_embeddings": ids.shape[1], "pad_token_id": 0}
    text |= {"eos_token_id": end, "bos_token_id": 0}
    image = {"image_size": settings["size"], "patch_size": settings["patch"], "num_channels": 1}
    config = CLIPConfig(
        vision_config={**sizes, **image},
        text_config={**sizes, **text},
        projection_dim=settings["width"],
    )
    return CLIPModel(config)


def trained(settings: Cell, seed: int) -> tuple[Any, Any]:
    """A CLIP trained to find the sentence of each image, and batches of test pairs."""
    import torch
    from torch.nn import functional

    import everydepth as ed
    from everydepth.data import Images, batches, load
    from everydepth_papers.evidence.baselines import linear_accuracy

    torch.manual_seed(seed)
    parts = (load(settings["data"], kind=Images, split=split) for split in ("train", "test"))
    train, test = (part.first(settings["rows"]) for part in parts)
    ids = words(train.classes)
    mask = (ids > 0).long()
    model = build(settings, ids)

    def contrast(images: Any, labels: Any, context: Any) -> Any:
        """Of all sentences, the image's own: the contrastive loss where captions repeat."""
        texts = model.get_text_features(input_ids=ids, attention_mask=mask).pooler_output
        images, texts = (functional.normalize(x, dim=-1) for x in (images, texts))
        scores = model.logit_scale.exp() * images @ texts.T
        return functional.cross_entropy(scores, labels, reduction="none")

    net = ed.EveryDepth(model, ed.end_to_end(), criterion=contrast, tower="vision")
    mean, std = (f(train.as_float().pixel_values).item() for f in (torch.mean, torch.std))
    ed.fit(
        net,
        train.normalized([mean], [std]),
        epochs=settings["epochs"],
        batch_size=64,
        lr=2e-3,
        warmup=0.1,
        seed=seed,
        progress=False,
    )

    pairs: list[dict[str, Any]] = []
    right = 0
    with torch.no_grad():
        texts = model.get_text_features(input_ids=ids, attention_mask=mask).pooler_output
        for batch in batches(test.normalized([mean], [std]), 250):
            pixels, label = batch["pixel_values"], batch["labels"]
            found = model.get_image_features(pixel_values=pixels).pooler_output
            score = functional.normalize(found, dim=-1) @ functional.normalize(texts, dim=-1).T
            right += int((score.argmax(-1) == label).sum())
            caption = {"input_ids": ids[label], "attention_mask": mask[label]}
            pairs.append({"pixel_values": pixels, **caption})
    return (model, right / len(test), linear_accuracy(train, test)), pairs


def pretrained(settings: Cell) -> tuple[Any, Any]:
    """A CLIP of the hub, and batches of images with their sentences."""
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer, CLIPModel

    from everydepth_papers.evidence.hub_images import HubImages

    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    rows = HubImages(settings["data"], "test", size=settings["size"], mean=MEAN, std=STD)
    texts = tokenizer([SENTENCE.format(c) for c in rows.classes], padding=True, return_tensors="pt")
    pairs = (
        {"pixel_values": batch["pixel_values"], **{k: v[batch["labels"]] for k, v in texts.items()}}
        for batch in DataLoader(rows, batch_size=250)
    )
    return (CLIPModel.from_pretrained(settings["model"]), None, None), list(pairs)


MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # of CLIP


def cell(settings: Cell, seed: int, folder: Path) -> Mapping[str, Any]:
    import everydepth as ed
    from everydepth.tracing.metrics import similarity

    metrics_of = {
        "embedding_cos": similarity.EmbeddingCos,
        "embedding_cos_other": similarity.EmbeddingCosOther,
        "embedding_cos_between": similarity.EmbeddingCosBetween,
    }
    (model, accuracy, linear), pairs = (
        pretrained(settings) if "model" in settings else trained(settings, seed)
    )
    vision, text = (ed.as_stream(model, tower=tower) for tower in ("vision", "text"))
    found: dict[str, Any] = {"accuracy": accuracy, "linear": linear}
    for centered, ending in ((True, ""), (False, "_raw")):
        metrics = [metrics_of[name](centered) for name in PAIRS.values()]
        seen = ed.trace(vision, pairs, metrics, against=text, progress=False)
        found |= {name + ending: numbers(seen[metric]) for name, metric in PAIRS.items()}
    return found


def to_last(result: Finished, name: str) -> np.ndarray:
    """COS with the last depth. Depth 0 is left out: its feature is the same for all samples."""
    return np.array(result[name], dtype=object)[1:, -1].astype(float)


LEARNED = Premise(
    test="accuracy of choosing the sentence above a linear classifier's",
    value=lambda r: r["accuracy"] - r["linear"],
    failing="inconclusive",
)


def rows(results: Sequence[Finished]) -> list[Row]:
    # A pretrained model is not asked whether it learned.
    premises = [LEARNED] if all(r["accuracy"] is not None for r in results) else []
    found = [
        over_seeds(
            "accuracy of choosing the sentence",
            None,
            [r["accuracy"] for r in results if r["accuracy"] is not None],
        )
    ]
    for name, words_ in (("vision", "vision"), ("text", "text"), ("cross", "vision with text")):
        found.append(
            holds_in(
                f"Fig. 22, 23: COS with the last layer rises, {words_}",
                PUBLISHED[name],
                list(results),
                lambda r, name=name: bool((np.diff(to_last(r, name)) >= 0).all()),
                "every layer from 1 on",
                premises=premises,
            )
        )
        for place in ("first", "last") if name == "cross" else ("first",):
            found.append(
                over_seeds(
                    f"Fig. 22: COS of the {place} layer with the last, {words_}",
                    PUBLISHED["gap"] if place == "last" else None,
                    [float(to_last(r, name)[0 if place == "first" else -1]) for r in results],
                    "centered: a constant offset between modalities does not count",
                )
            )
    raw = [r for r in results if "cross_raw" in r.values]
    if raw:  # results from before it was measured have none
        found.append(
            over_seeds(
                "Fig. 22, 23: COS of the last layers, vision with text, not centered",
                PUBLISHED["gap"],
                [float(to_last(r, "cross_raw")[-1]) for r in raw],
                "with the offset between modalities",
            )
        )
    found.append(
        over_seeds(
            "Fig. 22: largest fall of COS from one layer to the next, vision with text",
            None,
            [max(0.0, float(-np.diff(to_last(r, "cross")).min())) for r in results],
        )
    )
    found.append(
        holds_in(
            "Fig. 22, 23: the last layers of the towers are not aligned perfectly",
            PUBLISHED["gap"],
            list(results),
            lambda r: to_last(r, "cross")[-1] < 0.9,
            "COS below 0.9",
            premises=premises,
        )
    )
    return found


def figure(results: Sequence[Finished]) -> Figure:
    from matplotlib.figure import Figure

    page = Figure(figsize=(13, 3.6), layout="constrained")
    axes = page.subplots(1, 4)
    for axis, name in zip(axes[1:], PAIRS, strict=True):
        matrices = [np.array(r[name], dtype=object)[1:, 1:].astype(float) for r in results]
        cos = np.mean(matrices, 0)
        band(axes[0], range(1, len(cos) + 1), [m[:, -1] for m in matrices], name)
        edge = (0.5, len(cos) + 0.5)
        drawn = axis.imshow(cos, vmin=0, vmax=1, origin="lower", extent=(*edge, *edge))
        axis.set(title=f"COS, {name}", xlabel="depth", ylabel="depth")
        page.colorbar(drawn, ax=axis)
    axes[0].set(title="COS with the last layer", xlabel="depth (blocks)")
    axes[0].legend()
    return page


SMALL: Cell = {
    "data": "fashion-mnist", "rows": 60_000, "size": 28, "patch": 7, "depth": 6, "width": 48,
    "epochs": 2,
}  # fmt: skip
SMOKE: Cell = {
    **SMALL, "data": "digits", "rows": 150, "size": 8, "patch": 4, "depth": 2, "width": 16,
    "epochs": 1,
}  # fmt: skip
PAPER: Cell = {"model": "openai/clip-vit-base-patch32", "data": "uoft-cs/cifar10", "size": 224}


def large() -> Any:
    from transformers import CLIPConfig, CLIPModel

    return CLIPModel(CLIPConfig())


RECIPE = Recipe(
    name="tracing_clip",
    title="Similarity within and across the towers of CLIP",
    paper="tracing",
    item="Figures 22 and 23",
    presets={
        "smoke": Preset(cells=[SMOKE], cost="1 s"),
        "small": Preset(cells=[SMALL], seeds=3, cost="8 min, 1 core", needs=("fashion-mnist",)),
        "paper": Preset(
            cells=[PAPER],
            cost="5 min on a GPU",
            needs=("uoft-cs/cifar10",),
            models={"openai/clip-vit-base-patch32": large},
            memory_gib=8.0,
        ),
    },
    cell=cell,
    rows=rows,
    figure=figure,
    about=(
        "Small: two towers of 6 layers and width 48, trained on Fashion-MNIST, two passes, to find "
        "their sentence 'this is a photo of a ...' among ten (a first run saw 4,000 images three "
        "times and stayed below a linear classifier); paper: the pretrained CLIP-B/32. "
        "Features go through each tower's last norm and projection, as the model has them."
    ),
)
