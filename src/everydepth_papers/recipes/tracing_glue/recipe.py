"""Text classifiers by standard and aligned training: Figure 8 (AlignedBERT)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from everydepth_papers.evidence import Cell, Finished, Preset, Recipe, Row, over_seeds, published
from everydepth_papers.evidence.figures import band
from everydepth_papers.evidence.rows import holds_in, learned, numbers, paired, where
from everydepth_papers.evidence.texts import GLUE, glue, majority, pretrained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from everydepth.data import Texts

PUBLISHED = published(__file__)
LEARNED = learned("majority", "the most frequent answer", 0.02)


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
    from everydepth.data import batches, tokenized, trim_padding

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
        ("accuracy", "f1", "saturation"),
        progress=False,
    )
    return {
        "accuracy": numbers(seen["accuracy"][1:]),
        "f1": numbers(seen["f1"][1:]),
        "saturated": numbers(seen.results["saturation"].arrays["cumulative"][1:]),
        "majority": majority(parts[1].labels),
    }


def judged_by(task: str, results: Sequence[Finished]) -> str:
    """F1 where GLUE judges by it (and it was measured): classes of different size."""
    known = all("f1" in r.values for r in results)
    return "f1" if task in ("mrpc", "qqp") and known else "accuracy"


def rows(results: Sequence[Finished]) -> list[Row]:
    found: list[Row] = []
    for task in dict.fromkeys(r.cell["task"] for r in results):
        of = {name: where(results, task=task, objective=name) for name in ("standard", "aligned")}
        larger = of["standard"][0]["majority"]
        own = judged_by(task, results)
        for measure in dict.fromkeys(("accuracy", own)):
            for name, group in of.items():
                note = f"the larger class has {larger:.3f}" if measure == "accuracy" else ""
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
# Fixed before it was run: all pairs of MRPC and RTE, as many sentences of the others.
TUNED: Cell = {
    "model": "all-MiniLM-L6-v2", "rows": 4000, "look": 1000, "length": 64, "batch": 32,
    "epochs": 2, "lr": 1e-4,
}  # fmt: skip
SMALL: Cell = {
    "model": "scratch", "rows": 1500, "look": 1000, "vocabulary": 3000, "width": 64, "depth": 4,
    "length": 64, "batch": 32, "epochs": 2, "lr": 1e-3,
}  # fmt: skip
SMOKE: Cell = {**SMALL, "vocabulary": 60, "width": 16, "depth": 2, "length": 12, "epochs": 1}
PAPER: Cell = {
    **SMALL, "data": GLUE, "model": "google-bert/bert-base-uncased", "length": 256,
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
        "full": Preset(
            cells=cells(TUNED, "sst2", "cola", "mrpc", "rte"),
            seeds=3,
            cost="about 1.5 h, 1 core",
            needs=("sst2", "cola", "mrpc", "rte", "all-MiniLM-L6-v2"),
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
        "Small: a BERT of 4 layers and width 64 from scratch, with its own word pieces, on 4,000 "
        "sentences of SST-2 and 1,500 of CoLA, MRPC and RTE. Without pretraining the last three "
        "can hardly be learned; where neither network beats the larger class the row says "
        "inconclusive. Full: all-MiniLM-L6-v2, a pretrained BERT of 6 layers (a folder of that "
        "name under EVERYDEPTH_DATA), fine-tuned. MRPC and QQP are judged by F1, as GLUE does."
    ),
)
