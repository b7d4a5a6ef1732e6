"""Residual Relay: more wrong labels, the same picture? Noise of 1, 5, 10 and 20 %."""

from __future__ import annotations

from collections.abc import Sequence

from everydepth_papers.evidence import Cell, Preset, Recipe, later
from everydepth_papers.evidence.networks import hub_models

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
            models={
                **hub_models(PAPER[:1], "SequenceClassification"),
                **hub_models(PAPER[1:], "ImageClassification"),
            },
            memory_gib=12.0,
            launch="accelerate launch",
        ),
    },
    cell=later("label_noise:cell"),
    rows=later("residual_claims:rows", by_noise=True),
    figure=later("residual_claims:figure"),
    about=(
        "Small: a ViT of 4 blocks on 200 of scikit-learn's digits, first trained on 400 clean "
        "others; the skips of layer 1 and of layer 4 are removed; at most 60 epochs. 1 % of 200 "
        "rows are 2 wrong labels, so memorization has steps of a half there. The figure shows "
        "the largest ratio."
    ),
)
