"""Text classifiers by standard and aligned training: Figure 8 (AlignedBERT)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, over_seeds, published
from everydepth_papers.evidence.rows import holds_in, numbers, paired, where

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from everydepth.data import Texts

PUBLISHED = published(__file__)
HELD_OUT = {"sst2": "test", "cola": "valid", "rte": "dev", "mrpc": "test"}
LEARNED = 0.02  # above the share of the larger class: below that nothing was learned to compare


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


def texts(settings: Cell, seed: int) -> tuple[Texts, Texts]:
    import torch

    from everydepth.data import Texts, load

    task, rows = settings["task"], settings["rows"]
    if task == "synthetic":
        words = [("a good film", 1), ("a bad film", 0), ("good and warm", 1), ("bad and cold", 0)]
        lines, labels = zip(*words * 10, strict=True)
        made = Texts(lines, labels=torch.tensor(labels), classes=("negative", "positive"))
        return made, made
    if "data" in settings:
        columns = GLUE[task]
        fixed: dict[str, Any] = {"task": task, "text": columns[0], "pair": columns[1]}
        held_out = "validation_matched" if task == "mnli" else "validation"
        parts = [
            load(settings["data"], kind=Texts, split=split, label="label", **fixed)
            for split in ("train", held_out)
        ]
        return parts[0], parts[1]
    train, test = (load(task, kind=Texts, split=split) for split in ("train", HELD_OUT[task]))
    order = np.random.default_rng(seed).permutation(len(train))[:rows]
    return train.subset(order.tolist()), test.subset(range(min(len(test), settings["look"])))


def cell(settings: Cell, seed: int, folder: Path) -> Mapping[str, Any]:
    import torch

    import everydepth as ed
    from everydepth.data import batches, tokenized, trim_padding

    torch.manual_seed(seed)
    parts = texts(settings, seed)
    classes = len(parts[0].classes)
    if settings["model"] == "scratch":
        tokenizer = word_pieces(parts[0], settings["vocabulary"])
        model = scratch(settings, classes)
    else:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(settings["model"])
        model = AutoModelForSequenceClassification.from_pretrained(
            settings["model"], num_labels=classes
        )
    train, test = (tokenized(part, tokenizer, settings["length"]) for part in parts)
    ed.fit(
        ed.EveryDepth(
            model, ed.aligned() if settings["objective"] == "aligned" else ed.end_to_end()
        ),
        batches(train, settings["batch"], shuffle=True, seed=seed, transform=trim_padding),
        epochs=settings["epochs"],
        lr=settings["lr"],
        warmup=0.1,
        clip=1.0,
        seed=seed,
        progress=False,
    )
    seen = ed.trace(
        model,
        batches(test, 128, transform=trim_padding),
        ("accuracy", "saturation"),
        progress=False,
    )
    labels = np.asarray(parts[1].labels)
    return {
        "accuracy": numbers(seen["accuracy"][1:]),
        "saturated": numbers(seen.results["saturation"].arrays["cumulative"][1:]),
        "majority": float(np.bincount(labels).max() / len(labels)),
    }


def rows(results: Sequence[Finished]) -> list[Row]:
    found: list[Row] = []
    for task in dict.fromkeys(r.cell["task"] for r in results):
        of = {name: where(results, task=task, objective=name) for name in ("standard", "aligned")}
        majority = of["standard"][0]["majority"]
        best = max(np.mean([r["accuracy"][-1] for r in group]) for group in of.values())
        learned = best > majority + LEARNED
        for name, group in of.items():
            found += [
                over_seeds(
                    f"{task}: accuracy below the last layer, {name}",
                    None,
                    [float(np.mean(r["accuracy"][:-1])) for r in group],
                    "mean over layers 1 to L-1",
                ),
                over_seeds(
                    f"{task}: accuracy of the last layer, {name}",
                    None,
                    [r["accuracy"][-1] for r in group],
                    f"the larger class has {majority:.3f}",
                ),
            ]
        both = paired(of["aligned"], of["standard"])
        quantity = f"Fig. 8, {task}: aligned is better at every layer below the last"
        if not learned:
            found.append(
                Row(
                    quantity,
                    PUBLISHED["better"],
                    "inconclusive",
                    note="neither beats the larger class by 2 points, so there is nothing to "
                    "compare; the paper fine-tunes a pretrained BERT",
                )
            )
            continue
        found += [
            holds_in(
                quantity,
                PUBLISHED["better"],
                both,
                lambda a, s: all(np.greater(a["accuracy"][:-1], s["accuracy"][:-1])),
            ),
            holds_in(
                f"Fig. 8, {task}: aligned is better at the last layer too",
                PUBLISHED["better"],
                both,
                lambda a, s: a["accuracy"][-1] > s["accuracy"][-1],
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
            mean = np.mean([r["accuracy"] for r in group], 0)
            axis.plot(range(1, len(mean) + 1), mean, marker="o", label=name)
        share = where(results, task=task)[0]["majority"]
        axis.axhline(share, color="grey", linestyle=":", label="larger class")
        axis.set(title=task, xlabel="depth (blocks)")
    panels[0].set_ylabel("accuracy")
    panels[0].legend()
    return page


GLUE = {
    "sst2": ("sentence", None), "mrpc": ("sentence1", "sentence2"),
    "qqp": ("question1", "question2"), "mnli": ("premise", "hypothesis"),
    "qnli": ("question", "sentence"), "rte": ("sentence1", "sentence2"),
}  # fmt: skip
SMALL: Cell = {
    "model": "scratch", "rows": 1500, "look": 1000, "vocabulary": 3000, "width": 64, "depth": 4,
    "length": 64, "batch": 32, "epochs": 2, "lr": 1e-3,
}  # fmt: skip
SMOKE: Cell = {**SMALL, "vocabulary": 60, "width": 16, "depth": 2, "length": 12, "epochs": 1}
PAPER: Cell = {
    **SMALL, "data": "nyu-mll/glue", "model": "google-bert/bert-base-uncased", "length": 256,
    "epochs": 3, "lr": 2e-5,
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
            cells=[*cells({**SMALL, "rows": 4000}, "sst2"), *cells(SMALL, "cola", "mrpc", "rte")],
            seeds=3,
            cost="2 min, 1 core",
            needs=("sst2", "cola", "mrpc", "rte"),
        ),
        "paper": Preset(
            cells=cells(PAPER, *GLUE),
            cost="1 day on a GPU of 24 GB",
            needs=("nyu-mll/glue",),
            models={"google-bert/bert-base-uncased": bert},
            memory_gib=20.0,
        ),
    },
    cell=cell,
    rows=rows,
    figure=figure,
    about=(
        "Small: a BERT of 4 layers and width 64 from scratch, with its own word pieces, on 4,000 "
        "sentences of SST-2 and 1,500 of CoLA, MRPC and RTE. Without pretraining the last three "
        "can hardly be learned; where neither network beats the larger class the row says "
        "inconclusive. Accuracy is shown for all tasks (the paper: F1 for MRPC and QQP)."
    ),
)
