"""Residual Relay: the label as a text to continue, "The topic is about <label>"."""

from __future__ import annotations

from everydepth_papers.evidence import Preset
from everydepth_papers.evidence.networks import hub_models, noisy_set
from everydepth_papers.evidence.relay import relay

SMALL = {
    "name": "Emotions-stories260K",
    "task": "prompts",
    "data": "emotion",
    "model": "stories260K",
    "tokens": 56,
    "rows": 160,
    "before": 1000,
    "before_epochs": 3,
    "test": 300,
    "noise": 0.1,
    "epochs": 60,
    "batch": 20,
    "lr": 1e-3,
    "study": False,
}
# Fixed before it was run; epochs and the loss, over the whole sequence, as in the paper.
FULL = {
    **SMALL,
    "name": "Emotions-stories15M",
    "model": "stories15M",
    "rows": 400,
    "before": 2000,
    "epochs": 70,
    "lr": 3e-4,
    "loss_on": "all",
}
SMOKE = {
    "name": "synthetic-GPT2-tiny",
    "task": "prompts",
    "data": "synthetic",
    "vocabulary": 64,
    "tokens": 13,
    "width": 16,
    "depth": 2,
    "rows": 40,
    "before": 40,
    "before_epochs": 1,
    "test": 24,
    "noise": 0.1,
    "epochs": 2,
    "batch": 20,
    "lr": 1e-3,
    "study": False,
}
FINE = {
    "generative": True,
    **noisy_set("cardiffnlp/tweet_topic_single"),
    "tokens": 512,
    "study": False,
    "scales": [0.25, 0.5, 0.75],
}
PAPER = (
    {"name": "TweetTopic-Smol-LM", "model": "HuggingFaceTB/SmolLM2-135M"},
    {"name": "TweetTopic-GPT2-Small", "model": "openai-community/gpt2"},
)


RECIPE = relay(
    name="residual_generative",
    title="Memorized labels of a language model that writes them, without skips",
    item="Figures 4, 12 and 13",
    smoke=(SMOKE,),
    smoke_cost="4 s",
    small=Preset(cells=(SMALL,), seeds=3, cost="6 min, 1 core", needs=("emotion", "stories260K")),
    full=Preset(
        cells=(FULL,),
        seeds=3,
        cost="about 16 h, 1 core",
        needs=("emotion", "stories15M"),
        memory_gib=4.0,
    ),
    paper=[{**FINE, **one} for one in PAPER],
    models=hub_models(PAPER, "CausalLM"),
    cost="2 networks x 16 to 34 fine-tunings of 70 epochs; about 15 GPU days",
    memory_gib=24.0,
    removal="Fig. 4, 12",
    about=(
        "Small: stories260K, a pretrained Llama of 5 blocks; the loss is on the label's tokens "
        "alone; first trained on 1,000 clean texts, then on 160 others of which 10 % name a wrong "
        "label, for 60 epochs. A label counts as memorized if greedy decoding writes it. Full: "
        "stories15M, 400 texts, the loss on the whole sequence, 70 epochs. A GPT-2 of 4 blocks "
        "trained from nothing on the same texts did not learn them. Scaling (Figure 13) is "
        "measured on the classifier of residual_removal_language."
    ),
)
