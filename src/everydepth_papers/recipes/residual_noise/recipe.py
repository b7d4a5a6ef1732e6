"""Residual Relay: more wrong labels, the same picture? Noise of 1, 5, 10 and 20 %."""

from __future__ import annotations

from collections.abc import Sequence

from everydepth_papers.evidence import Cell, Preset
from everydepth_papers.evidence.networks import hub_models, noisy_set
from everydepth_papers.evidence.relay import relay

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
FINE = {"tokens": 512, "study": False}
PAPER = (
    {
        "name": "TweetTopic-Smol-LM",
        **noisy_set("cardiffnlp/tweet_topic_single"),
        "model": "HuggingFaceTB/SmolLM2-135M",
    },
    {
        "name": "UTK-Face-DeiT",
        **noisy_set("nlphuji/utk_faces"),
        "model": "facebook/deit-base-patch16-224",
    },
)


def noisy(settings: Cell, noises: Sequence[float]) -> tuple[Cell, ...]:
    return tuple({**settings, "noise": noise} for noise in noises)


RECIPE = relay(
    name="residual_noise",
    title="Memorization and accuracy without skips, at 1, 5, 10 and 20 % wrong labels",
    item="Figures 3 and 11",
    smoke=noisy(SMOKE, (0.1,)),
    smoke_cost="3 s",
    small=Preset(cells=noisy(SMALL, (0.01, 0.05, 0.1, 0.2)), seeds=3, cost="6 min, 1 core"),
    paper=[c for one in PAPER for c in noisy({**FINE, **one}, (0.05, 0.1, 0.2))],
    models={
        **hub_models(PAPER[:1], "SequenceClassification"),
        **hub_models(PAPER[1:], "ImageClassification"),
    },
    cost="2 networks x 3 ratios x 13 to 31 fine-tunings; about 30 GPU days",
    memory_gib=12.0,
    by_noise=True,
    removal="Fig. 3, 11",
    about=(
        "Small: a ViT of 4 blocks on 200 of scikit-learn's digits, first trained on 400 clean "
        "others; the skips of layer 1 and of layer 4 are removed; 60 epochs. 1 % of 200 "
        "rows are 2 wrong labels, so memorization has steps of a half there."
    ),
)
