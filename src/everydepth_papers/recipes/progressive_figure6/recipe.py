"""Figure 6: a pretrained decoder fine-tuned to classify, accuracy against depth on GLUE."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, both, later, published
from everydepth_papers.evidence.networks import unloaded
from everydepth_papers.evidence.rows import holds_in, learned
from everydepth_papers.evidence.texts import GLUE, glue, majority, pretrained

PUBLISHED = published(__file__)
LEARNED = learned("majority", "the most frequent answer", 0.02)
HUB = "Qwen/Qwen2-0.5B"
TASKS = ("cola", "sst2", "mrpc", "mnli", "qnli", "qqp")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def build(settings: Cell) -> tuple[Any, Any]:
    """The model with a new head, and its tokenizer."""
    classes = settings["classes"]
    if settings["model"] == "random":
        from transformers import LlamaConfig, LlamaForSequenceClassification

        config = LlamaConfig(**SIZES, num_labels=classes, pad_token_id=0)
        return LlamaForSequenceClassification(config), None
    model, tokenizer = pretrained(settings["model"], "SequenceClassification", num_labels=classes)
    model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def counted_tokens(rows: int, seed: int) -> Any:
    """Sequences whose class says which of two tokens is more frequent."""
    import torch

    from everydepth.data import Tokens

    ids = torch.randint(1, 64, (rows, 15), generator=torch.Generator().manual_seed(seed))
    labels = ((ids < 32).sum(1) > 7).long()
    return Tokens(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)


def cell(settings: Cell, seed: int, folder: Path) -> dict[str, Any]:
    from everydepth.data import tokenized
    from everydepth_papers.evidence.every_depth import seeded, trained

    seeded(seed)
    model, tokenizer = build(settings)
    if tokenizer is None:
        parts = [counted_tokens(200, 0), counted_tokens(200, 1)]
    else:
        parts = [tokenized(part, tokenizer, settings["length"]) for part in glue(settings)]
    found = trained(model, settings, seed, folder, *parts)
    return {**found, "majority": majority(parts[1].labels)}


def rows(results: Sequence[Finished]) -> list[Row]:
    from everydepth_papers.evidence.every_depth import depth_rows, pairs, statements, worst_fall

    found: list[Row] = []
    for task in dict.fromkeys(r.cell["task"] for r in results):
        found += depth_rows(results, task, {}, task=task)
        found += worst_fall(results, task, task=task)
        share = next(r["majority"] for r in results if r.cell["task"] == task)
        always = Row(
            f"{task}, always the same answer", None, round(100 * share, 2), note="accuracy"
        )
        found.append(always)
        found += statements(
            results, task, last="Fig. 6", early="Fig. 6", premise=LEARNED, task=task
        )
        found.append(
            holds_in(
                f"Fig. 6: {task}, LPA is above E2E below the last depth, on average",
                PUBLISHED["early"],
                pairs(results, task=task),
                lambda a, b: sum(b["accuracy"][:-1]) > sum(a["accuracy"][:-1]),
                premises=[LEARNED],
            )
        )
    return found


SMALL = {
    "model": "stories260K",
    "data": "local",
    "classes": 2,
    "length": 64,
    "rows": 12_800,
    "look": 500,
    "steps": 400,
    "batch": 32,
    "lr": 1e-3,
    "clip": 1.0,
}
# Fixed before it was run.
FULL = {**SMALL, "model": "stories15M", "lr": 3e-4}
TASKS_HERE = ("sst2", "cola", "mrpc", "rte")
PAPER = {
    "model": HUB,
    "data": GLUE,
    "length": 256,
    "epochs": 3,
    "batch": 32,
    "lr": 2e-5,
    "clip": 1.0,
}
RECIPE = Recipe(
    name="progressive_figure6",
    title="A pretrained decoder fine-tuned on GLUE, accuracy against depth",
    paper="progressive",
    item="Figure 6",
    about=(
        "Small: stories260K, a Llama of 5 blocks and width 64 pretrained on children's stories, "
        "fine-tuned for 400 steps of 32 texts on SST-2 (12,800 of its texts), CoLA, MRPC and RTE "
        "(the last in place of MNLI, QNLI and QQP, which are not here). So small a network "
        "learns something of SST-2 alone, and that in its last two blocks; on the others it stays "
        "at the level of the most frequent answer, where depths can hardly be compared. Full: "
        "stories15M, of 6 blocks and width 288. The paper preset is the test. The paper's learning "
        "rate is not given; 0.001 here and 0.00002 for Qwen2 are ours."
    ),
    presets={
        "smoke": Preset(
            cells=both(
                {
                    "model": "random",
                    "data": "synthetic",
                    "task": "counts",
                    "classes": 2,
                    "steps": 15,
                    "batch": 32,
                    "lr": 3e-3,
                }
            ),
            cost="3 s",
        ),
        "small": Preset(
            cells=[c for task in TASKS_HERE for c in both({**SMALL, "task": task})],
            seeds=3,
            cost="30 min, 1 core",
            needs=("stories260K", *TASKS_HERE),
            memory_gib=2.0,
        ),
        "full": Preset(
            cells=[c for task in TASKS_HERE for c in both({**FULL, "task": task})],
            seeds=3,
            cost="about 6 h, 1 core",
            needs=("stories15M", *TASKS_HERE),
            memory_gib=4.0,
        ),
        "paper": Preset(
            cells=[
                c
                for task in TASKS
                for c in both({**PAPER, "task": task, "classes": 3 if task == "mnli" else 2})
            ],
            cost="about 40 GPU hours on one A6000",
            needs=(GLUE, HUB),
            models={
                "Qwen2-0.5B": partial(
                    unloaded, HUB, "SequenceClassification", num_labels=2, pad_token_id=151_643
                )
            },
            memory_gib=20.0,
            launch="accelerate launch --mixed_precision bf16",
        ),
    },
    cell=cell,
    rows=rows,
    figure=later("every_depth:depth_figure", by=("task",)),
)
