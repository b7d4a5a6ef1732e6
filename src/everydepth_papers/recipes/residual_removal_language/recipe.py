"""Residual Relay on text: a network for each layer trained without its skips, and for each c."""

from __future__ import annotations

from everydepth_papers.evidence import Preset, published
from everydepth_papers.evidence.networks import hub_models, noisy_set
from everydepth_papers.evidence.relay import relay

PUBLISHED = published(__file__)

SMALL = {
    "name": "Emotions-GPT2-tiny",
    "task": "words",
    "data": "emotion",
    "vocabulary": 2000,
    "words": 24,
    "width": 64,
    "depth": 4,
    "rows": 240,
    "before": 1200,
    "before_epochs": 3,
    "test": 500,
    "noise": 0.05,
    "epochs": 100,
    "batch": 25,
    "lr": 1e-3,
    "scales": [0.25, 0.5, 0.75],
}
SMOKE = {
    **SMALL,
    "name": "synthetic-GPT2-tiny",
    "data": "synthetic",
    "vocabulary": 64,
    "words": 8,
    "width": 16,
    "depth": 2,
    "rows": 40,
    "before": 40,
    "before_epochs": 1,
    "test": 24,
    "epochs": 2,
    "scales": [0.5],
}
FINE = {"tokens": 512, "scales": [0.25, 0.5, 0.75]}
TOPICS = noisy_set("cardiffnlp/tweet_topic_single")
PAPER = (
    {
        "name": "Emotions-GPT2-Medium",
        **noisy_set("dair-ai/emotion"),
        "model": "openai-community/gpt2-medium",
    },
    {
        "name": "20NewsGroup-GPT2-Small",
        **noisy_set("SetFit/20_newsgroups"),
        "model": "openai-community/gpt2",
    },
    {**TOPICS, "name": "TweetTopic-Smol-LM", "model": "HuggingFaceTB/SmolLM2-135M"},
    {**TOPICS, "name": "TweetTopic-Qwen2", "model": "Qwen/Qwen2-0.5B"},
)


RECIPE = relay(
    name="residual_removal_language",
    title="Do skips carry memorization? A GPT-2 trained without, or with scaled, skips",
    item="Figures 1, 2, 5-10, 13-24, Table 2 (language)",
    smoke=(SMOKE,),
    small=Preset(cells=(SMALL,), seeds=3, cost="12 min, 1 core", needs=("emotion",)),
    paper=[{**FINE, **one} for one in PAPER],
    models=hub_models(PAPER, "SequenceClassification"),
    cost="4 networks x 16 to 34 fine-tunings of 70 epochs; about 40 GPU days",
    memory_gib=24.0,
    query=PUBLISHED["query_std"],
    about=(
        "Small: a GPT-2 of 4 blocks whose tokens are words, first trained on 1,200 clean texts, "
        "then on 240 others of which 5 % have a wrong label, every arm for 100 epochs (the "
        "recorded run stopped each when all labels were fitted). The learning rate was chosen on "
        "the untouched network with another seed, for reaching 100 %; nothing was tuned for a "
        "claim. In a first run the limit was 30 epochs, at which 8 of the 15 runs had not "
        "fitted all labels; it was raised for that reason, and they were trained again. The "
        "paper's figures have no printed numbers, so a row says what the text claims."
    ),
)
