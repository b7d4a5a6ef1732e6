"""Text classifiers by standard and aligned training: Figure 8 (AlignedBERT)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, over_seeds, published
from everydepth_papers.evidence.figures import band
from everydepth_papers.evidence.rows import holds_in, learned, numbers, paired, where
from everydepth_papers.evidence.texts import (
    GLUE,
    by_length,
    glue,
    majority,
    pretrained,
    words_accuracy,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from everydepth.data import Texts

PUBLISHED = published(__file__)
LEARNED = learned("baseline", "the most frequent answer and a linear classifier on words", 0.02)


def scratch(settings: Cell, classes: int) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=settings["vocabulary"],
            hidden_size=settings["width"],
            num_hidden_layers=settings["depth"],
            num_attention_heads=4,
            intermediate_size=2 * settings["width"],
            max_position_embeddings=settings["length"],
            num_labels=classes,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def word_pieces(texts: Texts, size: int) -> Any:
    """BERT's kind of tokenizer, learned from the training texts."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.train_from_iterator(
        [*texts.texts, *(texts.pairs or ())],
        trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False),
    )
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def texts(settings: Cell) -> tuple[Texts, Texts]:
    if settings["task"] != "synthetic":
        return glue(settings)
    import torch

    from everydepth.data import Texts

    words = [("a good film", 1), ("a bad film", 0), ("good and warm", 1), ("bad and cold", 0)]
    lines, labels = zip(*words * 10, strict=True)
    made = Texts(lines, labels=torch.tensor(labels), classes=("negative", "positive"))
    return made, made


def cell(settings: Cell, seed: int, folder: Path) -> Mapping[str, Any]:
    import torch

    import everydepth as ed
    from everydepth.data import tokenized

    torch.manual_seed(seed)
    parts = texts(settings)
    classes = len(parts[0].classes)
    if settings["model"] == "scratch":
        tokenizer = word_pieces(parts[0], settings["vocabulary"])
        model = scratch(settings, classes)
    else:
        kind = "SequenceClassification"
        model, tokenizer = pretrained(settings["model"], kind, num_labels=classes)
    train, test = (tokenized(part, tokenizer, settings["length"]) for part in parts)
    ed.fit(
        ed.EveryDepth(
            model, ed.aligned() if settings["objective"] == "aligned" else ed.end_to_end()
        ),
        by_length(train, settings["batch"], seed=seed),
        epochs=settings["epochs"],
        lr=settings["lr"],
        warmup=0.1,
        clip=1.0,
        seed=seed,
        progress=False,
    )
    metrics = ("accuracy", "f1", "saturation")
    seen = ed.trace(model, by_length(test, 128), metrics, progress=False)
    larger = majority(parts[1].labels)
    words = words_accuracy(*parts)
    return {
        "accuracy": numbers(seen["accuracy"][1:]),
        "f1": numbers(seen["f1"][1:]),
        "saturated": numbers(seen.results["saturation"].arrays["cumulative"][1:]),
        "majority": larger,
        "words": words,
        "baseline": max(larger, words),
    }


def judged_by(task: str, results: Sequence[Finished]) -> str:
    """F1 where GLUE judges by it (and it was measured): classes of different size."""
    known = all("f1" in r.values for r in results)
    return "f1" if task in ("mrpc", "qqp") and known else "accuracy"


def rows(results: Sequence[Finished]) -> list[Row]:
    found: list[Row] = []
    for task in dict.fromkeys(r.cell["task"] for r in results):
        of = {name: where(results, task=task, objective=name) for name in ("standard", "aligned")}
        larger, words = (of["standard"][0][name] for name in ("majority", "words"))
        beside = f"the larger class has {larger:.3f}, a linear classifier on words {words:.3f}"
        own = judged_by(task, results)
        for measure in dict.fromkeys(("accuracy", own)):
            for name, group in of.items():
                note = beside if measure == "accuracy" else ""
                found += [
                    over_seeds(
                        f"{task}: {measure} below the last layer, {name}",
                        None,
                        [float(np.mean(r[measure][:-1])) for r in group],
                        "mean over layers 1 to L-1",
                    ),
                    over_seeds(
                        f"{task}: {measure} of the last layer, {name}",
                        None,
                        [r[measure][-1] for r in group],
                        note,
                    ),
                ]
        both = paired(of["aligned"], of["standard"])
        found += [
            holds_in(
                f"Fig. 8, {task}: aligned is better at every layer below the last",
                PUBLISHED["better"],
                both,
                lambda a, s, own=own: all(np.greater(a[own][:-1], s[own][:-1])),
                f"by {own}",
                premises=[LEARNED],
            ),
            holds_in(
                f"Fig. 8, {task}: aligned is better at the last layer too",
                PUBLISHED["better"],
                both,
                lambda a, s, own=own: a[own][-1] > s[own][-1],
                f"by {own}",
                premises=[LEARNED],
            ),
        ]
    return found


def figure(results: Sequence[Finished]) -> Figure:
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(r.cell["task"] for r in results))
    page = Figure(figsize=(3.2 * len(tasks), 3.2), layout="constrained")
    panels = np.atleast_1d(page.subplots(1, len(tasks)))
    for axis, task in zip(panels, tasks, strict=True):
        for name in ("standard", "aligned"):
            group = where(results, task=task, objective=name)
            own = judged_by(task, results)
            values = [r[own] for r in group]
            band(axis, range(1, len(values[0]) + 1), values, name)
        share = where(results, task=task)[0]["majority"]
        axis.axhline(share, color="gray", linestyle=":", label="larger class")
        axis.set(title=task, xlabel="depth (blocks)", ylabel=judged_by(task, results))
    panels[0].legend()
    return page


TASKS = ("sst2", "mrpc", "qqp", "mnli", "qnli", "rte")
# Fixed before it was run; a pair of sentences costs about twice the time of one.
TUNED: Cell = {
    "model": "minilm", "rows": 3200, "look": 1000, "length": 64, "batch": 32, "epochs": 2,
    "lr": 1e-4,
}  # fmt: skip
PAIRS: Cell = {**TUNED, "rows": 2000}
SMOKE: Cell = {
    **TUNED, "model": "scratch", "vocabulary": 60, "width": 16, "depth": 2, "length": 12,
    "epochs": 1, "lr": 1e-3,
}  # fmt: skip
PAPER: Cell = {
    **TUNED, "data": GLUE, "model": "google-bert/bert-base-uncased", "rows": None, "look": None,
    "length": 256, "epochs": 3, "lr": 2e-5,
}  # fmt: skip


def cells(settings: Cell, *tasks: str) -> list[Cell]:
    names = ("standard", "aligned")
    return [{**settings, "task": task, "objective": name} for task in tasks for name in names]


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig())


RECIPE = Recipe(
    name="tracing_glue",
    title="AlignedBERT on GLUE, accuracy per layer",
    paper="tracing",
    item="Figure 8",
    presets={
        "smoke": Preset(cells=cells(SMOKE, "synthetic"), cost="1 s"),
        "small": Preset(
            cells=[*cells(TUNED, "sst2", "cola"), *cells(PAIRS, "mrpc", "rte")],
            seeds=3,
            cost="about 30 min a seed, 1 core",
            needs=("sst2", "cola", "mrpc", "rte", "minilm"),
        ),
        "paper": Preset(
            cells=cells(PAPER, *TASKS),
            cost="1 day on a GPU of 24 GB",
            needs=(GLUE,),
            models={"google-bert/bert-base-uncased": bert},
            memory_gib=20.0,
        ),
    },
    cell=cell,
    rows=rows,
    figure=figure,
    about=(
        "Small: all-MiniLM-L6-v2, a pretrained BERT of 6 layers (the folder minilm under "
        "EVERYDEPTH_DATA), fine-tuned on 3,200 sentences of SST-2 and CoLA and 2,000 pairs of "
        "MRPC and RTE, twice each. Sentences of about one length share a batch. A statement "
        "counts only where both networks pass the larger class and a linear classifier on words "
        "by 2 points. MRPC and QQP are judged by F1, as GLUE does."
    ),
)
