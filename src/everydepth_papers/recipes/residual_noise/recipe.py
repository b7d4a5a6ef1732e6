"""Residual Relay: more wrong labels, the same picture? Noise of 1, 5, 10 and 20 %."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from everydepth_papers.evidence import (
    Cell,
    Preset,
    Recipe,
    Result,
    Row,
    later,
    published,
)
from everydepth_papers.evidence.networks import SMOLLM2_135M

if TYPE_CHECKING:
    from torch import nn

PUBLISHED = published(__file__)

SMALL = {
    "name": "digits-ViT",
    "task": "images",
    "data": "digits",
    "patch": 4,
    "width": 64,
    "depth": 4,
    "rows": 200,
    "before": 400,
    "before_epochs": 10,
    "test": 300,
    "layers": [1, 4],
    "epochs": 60,
    "batch": 25,
    "lr": 5e-4,
    "study": False,
}
SMOKE = {
    **SMALL,
    "width": 16,
    "depth": 2,
    "rows": 60,
    "before": 60,
    "before_epochs": 1,
    "test": 30,
    "layers": [1],
    "epochs": 2,
}
FINE = {"task": "hub", "epochs": 70, "batch": 16, "lr": 2e-5, "tokens": 512, "study": False}
PAPER = (
    {
        "name": "TweetTopic-Smol-LM",
        "data": "cardiffnlp/tweet_topic_single",
        "text": "text",
        "label": "label",
        "train_split": "train_coling2022",
        "test_split": "test_coling2022",
        "model": "HuggingFaceTB/SmolLM2-135M",
        "of_class": 3,
    },
    {
        "name": "UTK-Face-DeiT",
        "data": "nlphuji/utk_faces",
        "model": "facebook/deit-base-patch16-224",
        "of_class": 2,
    },
)


def noisy(settings: Cell, noises: Sequence[float]) -> tuple[Cell, ...]:
    return tuple({**settings, "noise": noise} for noise in noises)


def built(name: str) -> nn.Module:
    """The networks of the paper preset, from their configs alone."""
    import transformers as hf

    if name == "UTK-Face-DeiT":
        return hf.DeiTForImageClassification(hf.DeiTConfig())
    config = hf.LlamaConfig(
        **SMOLLM2_135M,
    )
    return hf.LlamaForSequenceClassification(config)


def rows(results: Sequence[Result]) -> Sequence[Row]:
    from dataclasses import replace

    from everydepth_papers.evidence import residual_claims as claims

    found: list[Row] = []
    for name, noise in dict.fromkeys((r.cell["name"], r.cell["noise"]) for r in results):
        own = [r for r in results if (r.cell["name"], r.cell["noise"]) == (name, noise)]
        for row in claims.removal_rows(own):
            found.append(replace(row, quantity=f"{noise:.0%} noise: {row.quantity}"))
    return found


RECIPE = Recipe(
    name="residual_noise",
    title="Memorization and accuracy without skips, at 1, 5, 10 and 20 % wrong labels",
    paper="residual",
    item="Figures 3 and 11",
    presets={
        "smoke": Preset(cells=noisy(SMOKE, (0.1,)), cost="3 s"),
        "small": Preset(cells=noisy(SMALL, (0.01, 0.05, 0.1, 0.2)), seeds=3, cost="3 min, 1 core"),
        "paper": Preset(
            cells=tuple(c for one in PAPER for c in noisy({**FINE, **one}, (0.05, 0.1, 0.2))),
            cost="2 networks x 3 ratios x 13 to 31 fine-tunings; about 30 GPU days",
            needs=tuple(str(one["data"]) for one in PAPER),
            models={str(one["name"]): (lambda n=str(one["name"]): built(n)) for one in PAPER},
            memory_gib=12.0,
            launch="accelerate launch -m everydepth reproduce residual_noise --preset paper",
        ),
    },
    cell=later("label_noise:cell"),
    rows=rows,
    figure=later("residual_claims:figure"),
    about=(
        "Small: a ViT of 4 blocks on 200 of scikit-learn's digits, first trained on 400 clean "
        "others; the skips of layer 1 and of layer 4 are removed; at most 60 epochs. 1 % of 200 "
        "rows are 2 wrong labels, so memorization has steps of a half there. The figure shows "
        "the largest ratio."
    ),
)
