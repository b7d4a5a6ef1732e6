"""The protocol of Residual Relay: wrong labels, skips removed, trained, compared.

A cell is one seed of one task. It trains a network for each removed layer, looks at the gradients
of the untouched one, and returns everything as JSON; it continues where it was stopped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)
from torch.utils.data import ConcatDataset, Dataset

from everydepth.ablations import (
    GradientWatch,
    ablate,
    gradient_study,
    label_prompts,
    memorization,
)
from everydepth.ablations.prompts import TEMPLATE
from everydepth.data import Images, Texts, Tokens, flip_labels, load, tokenized
from everydepth.errors import SettingError, UnsupportedModelError
from everydepth.files import read_json
from everydepth.objectives import end_to_end
from everydepth.runs import Run
from everydepth.training import EveryDepth, UntilAccuracy, fit
from everydepth_papers.bound import bounded
from everydepth_papers.evidence.baselines import linear_accuracy
from everydepth_papers.evidence.networks import vit
from everydepth_papers.evidence.recipe import Cell
from everydepth_papers.evidence.records import (
    ablation_record,
    memorization_record,
    study_record,
    view_record,
)
from everydepth_papers.evidence.running import data_folder
from everydepth_papers.evidence.texts import majority
from everydepth_papers.unified import unified_view

UNKNOWN, PAD = 1, 0  # words
PIXELS = {"digits": (0.31, 0.38), "fashion-mnist": (0.286, 0.353)}  # mean and std


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a network is trained and tested on.

    labels, answers: the true class of every training and of every test row. train: the rows with
    given classes as labels.
    before: other rows with right labels, on which a network is trained first. learned: the training
    rows as the loss sees them, where that is more than what counts as memorized.
    """

    labels: Tensor
    answers: Tensor
    train: Callable[[Tensor], Any]
    test: Any
    classes: int
    model: Callable[[], nn.Module]
    before: Any = None
    learned: Callable[[Tensor], Any] | None = None


def cell(settings: Cell, seed: int, folder: Path) -> dict[str, Any]:
    """Train with each layer's skips removed; study the untouched network.

    settings: `task` and what its function reads, `noise`, `of_class`, `layers` (all by default),
    `epochs`, `batch`, `lr`; `scales` (of layer 1) and `watch` (epochs between two looks
    at gradients) where wanted.
    """
    torch.manual_seed(seed)
    task = TASKS[settings["task"]](settings, seed)
    noise = flip_labels(
        task.labels,
        settings["noise"],
        of_class=settings.get("of_class"),
        classes=task.classes,
        seed=seed,
    )
    noisy = task.train(noise.labels)
    learned = noisy if task.learned is None else task.learned(noise.labels)
    start = _started(task, settings, seed, folder / "start")

    def train(model: nn.Module, path: Path | None, seed: int) -> Any:
        # Every arm for the same number of epochs (App. D.3); where all labels were first fitted is
        # noted, with the test accuracy there.
        callbacks: list[Any] = [UntilAccuracy(noisy, stop=False, also=task.test)]
        if "watch" in settings:
            callbacks.append(
                GradientWatch(task.test, noisy, flipped=noise, every=settings["watch"])
            )
        return _fit(model, learned, settings, seed, path, epochs=settings["epochs"], more=callbacks)

    def swept(layers: Any, scales: tuple[float, ...], run: Path) -> Any:
        return ablate(
            start,
            task.test,
            layers=layers,
            c=scales,
            train=train,
            seeds=(seed,),
            run=run,
            noisy=noisy,
            flipped=noise,
            progress=False,
        )

    removed = swept(settings.get("layers"), (0.0, 1.0), folder / "removal")
    cells = _cells(folder / "removal")
    untouched, without = cells[f"untouched-seed-{seed}"], cells.get(f"layer-01-c-0-seed-{seed}")
    trained = untouched / "model"
    model: Any = type(start).from_pretrained(trained).eval()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    found: dict[str, Any] = {
        "rows": len(task.labels),
        "flipped": len(noise.flipped),
        **baseline(task, noisy),
        "removed": ablation_record(removed),
        "epochs": {name: _epochs(path) for name, path in sorted(cells.items())},
        "by_depth": memorization_record(
            memorization(model, noisy, task.test, flipped=noise, progress=False)
        ),
    }
    if settings.get("study", True):
        found |= _studied(model, task, noisy, noise, removed)
    if "scales" in settings:
        scaled = swept((1,), tuple(settings["scales"]), folder / "scaled")
        found["scaled"] = ablation_record(scaled)
    if "watch" in settings:
        found["watched"] = {"all skips": _watched(untouched)}
        if without is not None:
            found["watched"]["layer 1 without"] = _watched(without)
    return found


def baseline(task: Task, noisy: Any) -> dict[str, float]:
    """What a network that learned beats on the test rows: of images a linear classifier fitted to
    the same rows, clean and noisy, of texts the most frequent answer."""
    if isinstance(noisy, Images):
        seen = noisy if task.before is None else ConcatDataset([noisy, task.before])
        return {"linear": linear_accuracy(seen, task.test)}
    return {"majority": majority(task.answers)}


def _studied(model: nn.Module, task: Task, noisy: Any, noise: Any, removed: Any) -> dict[str, Any]:
    study = gradient_study(model, task.test, noisy, flipped=noise, progress=False)
    after = ablate(model, task.test, c=(0.0, 1.0), progress=False)
    whole = removed.layers == study.layers
    try:
        bound = bounded(model, task.test)
    except (SettingError, UnsupportedModelError) as reason:
        bound = f"no bound: {reason}"
    return {
        "study": study_record(study, bound),
        "after": ablation_record(after),
        "view": view_record(unified_view(study, removed if whole else after)),
        # Where the bound is defined, so is one query map per layer.
        "query_std": None if isinstance(bound, str) else list(bound.widths.query),
    }


def _started(task: Task, settings: Cell, seed: int, folder: Path) -> nn.Module:
    """A new network, or one that was trained on other, clean rows."""
    torch.manual_seed(seed)
    model: Any = task.model()
    if task.before is None:
        return model
    if not (folder / "model").is_dir():
        epochs = settings["before_epochs"]
        _fit(model, task.before, settings, seed, folder, epochs=epochs, more=[])
    return type(model).from_pretrained(folder / "model")


def _fit(
    model: nn.Module,
    data: Any,
    settings: Cell,
    seed: int,
    folder: Path | None,
    *,
    epochs: int,
    more: list[Any],
) -> Any:
    return fit(
        EveryDepth(model, end_to_end()),
        data,
        epochs=epochs,
        batch_size=settings["batch"],
        optimizer="adam",
        lr=settings["lr"],
        schedule="constant",
        warmup=settings.get("warmup", 0),
        seed=seed,
        run=folder,
        resume=True,
        keep=1,
        save_every=settings.get("save_every", 10**6),  # short runs start again
        callbacks=more,
        progress=False,
    )


def _cells(run: Path) -> dict[str, Path]:
    """The folders of the cells of `ablate`, by what was removed."""
    found: dict[str, Path] = {}
    for file in (run / "cells").glob("*.json"):
        cell = read_json(file)["cell"]
        layer, c = cell["layer"], cell["c"]
        what = "untouched" if layer is None else f"layer-{layer:02d}-c-{c:g}"
        found[f"{what}-seed-{cell['seed']}"] = run / "work" / file.stem
    return found


def _epochs(folder: Path) -> dict[str, Any]:
    """Epochs of a run, its training accuracy, and when it first fitted all labels."""
    results = Run.open(folder).results()
    until = results["callbacks"]["UntilAccuracy"]
    return {
        "epochs": len(until["accuracy"]),
        "reached": until["reached"],
        "train_accuracy": until["accuracy"][-1],
        "best_accuracy": max(until["accuracy"]),
        "first": until["first"],
    }


def _watched(folder: Path) -> list[dict[str, Any]]:
    return Run.open(folder).results()["callbacks"]["GradientWatch"]["epochs"]


# -- tasks ----------------------------------------------------------------------------------------


def images(settings: Cell, seed: int) -> Task:
    """A small ViT on digits or Fashion-MNIST; which rows are taken depends on the seed."""
    name = settings["data"]
    mean, std = PIXELS[name]
    every = load(name, split="train", kind=Images)
    order = np.random.default_rng(seed).permutation(len(every))
    rows, more = settings["rows"], settings.get("before", 0)
    chosen = every.subset(order[: rows + more].tolist()).normalized((mean,), (std,))
    train = chosen.subset(range(rows))
    test = load(name, split="test", kind=Images).normalized((mean,), (std,))
    sizes = {name: settings[name] for name in ("patch", "width", "depth")}
    sizes |= {"size": train.pixel_values.shape[-1], "heads": 4, "inner": 2 * settings["width"]}
    return Task(
        labels=train.labels,
        answers=test.labels[: settings["test"]],
        train=lambda labels: replace(train, labels=labels),
        test=test.first(settings["test"]),
        classes=10,
        model=lambda: vit(channels=1, **sizes),
        before=chosen.subset(range(rows, rows + more)) if more else None,
    )


def words(settings: Cell, seed: int) -> Task:
    """A small GPT-2 that tells the emotion of a text; its tokens are words."""
    every, train, test, more = _texts(settings, seed)
    size, length = settings["vocabulary"], settings["words"]
    tokenizer = Words(every, size)

    def tokens(texts: Texts) -> Tokens:
        ids = torch.full((len(texts), length), PAD)
        for row, found in enumerate(tokenizer(list(texts.texts))["input_ids"]):
            kept = found[:length] or [UNKNOWN]
            ids[row, length - len(kept) :] = torch.tensor(kept)
        return Tokens(ids, (ids != PAD).long(), labels=texts.labels)

    config = _gpt2(settings, length)
    config.num_labels = len(every.classes)
    rows = tokens(train)
    return Task(
        labels=cast(Tensor, train.labels),
        answers=cast(Tensor, test.labels),
        train=lambda labels: replace(rows, labels=labels),
        test=tokens(test),
        classes=len(every.classes),
        model=lambda: hf.GPT2ForSequenceClassification(config),
        before=None if more is None else tokens(more),
    )


def prompts(settings: Cell, seed: int) -> Task:
    """A language model continues "<text> The topic is about" with the label.

    model: a folder of weights with a tokenizer; without, a small GPT-2 whose tokens are words.
    """
    every, train, test, more = _texts(settings, seed)
    length = settings["tokens"]
    tokenizer: Any = Words(every, settings.get("vocabulary", 0))
    config = _gpt2(settings, length) if "model" not in settings else None
    if config is None:
        where = data_folder(settings["model"])
        tokenizer = hf.AutoTokenizer.from_pretrained(where)

    def written(texts: Texts, labels: Tensor | None, loss_on: Any = "label") -> Tokens:
        given = cast(Tensor, texts.labels if labels is None else labels)
        return label_prompts(texts.texts, given, every.classes, tokenizer, length, loss_on=loss_on)

    # What the paper calls memorized is the label; its loss is on the whole sequence.
    loss_on = settings.get("loss_on", "label")

    def model() -> nn.Module:
        if config is not None:
            return hf.GPT2LMHeadModel(config)
        where = data_folder(settings["model"])
        return hf.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)

    return Task(
        labels=cast(Tensor, train.labels),
        answers=cast(Tensor, test.labels),
        train=lambda labels: written(train, labels),
        test=written(test, None),
        classes=len(every.classes),
        model=model,
        before=None if more is None else written(more, None, loss_on),
        learned=lambda labels: written(train, labels, loss_on),
    )


def _gpt2(settings: Cell, length: int) -> Any:
    return hf.GPT2Config(
        vocab_size=settings["vocabulary"],
        n_positions=length,
        n_embd=settings["width"],
        n_layer=settings["depth"],
        n_head=4,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


def hub(settings: Cell, seed: int) -> Task:
    """The paper's own pairs of data and pretrained network, by their names on the hub."""
    name = settings["data"]
    options = {k: settings[k] for k in ("text", "label") if k in settings}
    train: Any = load(name, split=settings.get("train_split", "train"), **options)
    pieces: tuple[Any, ...] = (train,)
    if "parts" in settings:  # training, validation and perhaps test rows
        pieces = train.split(settings["parts"], seed=seed, stratified=True)
    train = pieces[0]
    own = settings.get("test_split", "test")
    test: Any = pieces[2] if len(pieces) > 2 else load(name, split=own, **options)
    classes = len(train.classes)
    if isinstance(train, Images):
        images = train
        return Task(
            labels=images.labels,
            answers=test.labels,
            train=lambda labels: Resized(replace(images, labels=labels)),
            test=Resized(cast(Images, test)),
            classes=classes,
            model=lambda: hf.AutoModelForImageClassification.from_pretrained(
                settings["model"], num_labels=classes, ignore_mismatched_sizes=True
            ),
        )
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    length = settings["tokens"]
    if settings.get("generative"):

        def written(labels: Tensor, loss_on: Any = "label") -> Tokens:
            return label_prompts(
                train.texts, labels, train.classes, tokenizer, length, loss_on=loss_on
            )

        return Task(
            labels=train.labels,
            answers=test.labels,
            train=written,
            test=label_prompts(test.texts, test.labels, test.classes, tokenizer, length),
            classes=classes,
            model=lambda: hf.AutoModelForCausalLM.from_pretrained(settings["model"]),
            learned=partial(written, loss_on="all"),
        )
    rows = tokenized(train, tokenizer, length)
    return Task(
        labels=train.labels,
        answers=test.labels,
        train=lambda labels: replace(rows, labels=labels),
        test=tokenized(test, tokenizer, length),
        classes=classes,
        model=lambda: hf.AutoModelForSequenceClassification.from_pretrained(
            settings["model"], num_labels=classes, pad_token_id=tokenizer.pad_token_id
        ),
    )


TASKS: Mapping[str, Callable[[Cell, int], Task]] = {
    "images": images,
    "words": words,
    "prompts": prompts,
    "hub": hub,
}


class Resized(Dataset[dict[str, Tensor]]):
    """Images brought to 224 x 224 and to -1..1 as they are read; stored as they are."""

    def __init__(self, rows: Images, size: int = 224) -> None:
        self.rows, self.size = rows, size

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        pixels = self.rows.pixel_values[index].float().div(127.5).sub(1)[None]
        if pixels.shape[1] == 1:
            pixels = pixels.expand(1, 3, -1, -1)
        bigger = F.interpolate(pixels, (self.size, self.size), mode="bilinear", antialias=True)
        return {"pixel_values": bigger[0], "labels": self.rows.labels[index]}


class Words:
    """A tokenizer: the words of the labels and of the template, then the most frequent others."""

    pad_token_id = PAD

    def __init__(self, texts: Texts, size: int) -> None:
        first = [*_words(TEMPLATE), *(word for name in texts.classes for word in _words(name))]
        counts = Counter(word for text in texts.texts for word in _words(text))
        ordered = dict.fromkeys([*first, *(word for word, _ in counts.most_common())])
        self.known = {word: i for i, word in enumerate(ordered, start=2) if i < size}

    def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
        ids = [[self.known.get(word, UNKNOWN) for word in _words(text)] for text in texts]
        return {"input_ids": ids}


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _texts(settings: Cell, seed: int) -> tuple[Texts, Texts, Texts, Texts | None]:
    """All texts, those to train on, those to test on, and other clean ones."""
    if settings["data"] == "synthetic":
        every = test = _synthetic()
    else:
        every = load(settings["data"], split="train", kind=Texts)
        test = load(settings["data"], split="test", kind=Texts)
    order = np.random.default_rng(seed).permutation(len(every)).tolist()
    rows, more = settings["rows"], settings.get("before", 0)
    return (
        every,
        every.subset(order[:rows]),
        test.first(settings["test"]),
        every.subset(order[rows : rows + more]) if more else None,
    )


def _synthetic() -> Texts:
    """A few synthetic sentences, for a smoke run without data."""
    marks = {"joy": "glad happy sun", "fear": "dark afraid storm", "love": "dear kiss heart"}
    texts: list[str] = []
    labels: list[int] = []
    for i in range(96):
        label, said = list(marks)[i % 3], marks[list(marks)[i % 3]].split()
        texts.append(f"i feel {said[i // 3 % 3]} and {said[i // 9 % 3]} {'abcdefgh'[i // 3 % 8]}")
        labels.append(list(marks).index(label))
    return Texts(tuple(texts), labels=torch.tensor(labels), classes=tuple(marks))
