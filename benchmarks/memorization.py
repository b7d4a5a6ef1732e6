"""Do skips carry memorisation? One model trained for each removed layer, on data with wrong labels.

python benchmarks/memorization.py digits|emotion [--pretrained] [--run DIR]

The claims of paper 004, checked on small networks, trained from scratch or, as in the paper, from
a network that was trained (with all its skips) on other, clean data: what removing the skips of
one layer does to memorisation and to test accuracy, and gradient norms of both. Finished cells in
DIR are not trained again. Nothing was tuned but the learning rate, once, so that the untouched
model fits the noise.
"""

from __future__ import annotations

import argparse
import lzma
import os
import re
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import record
from torch import nn
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

import everydepth as ed
from everydepth.ablations import interval
from everydepth.data import Rows, Tokens, flip_labels, load_digits
from everydepth.training import UntilAccuracy

NOISE, LAYERS, SEEDS = 0.05, 4, (0, 1, 2)


@dataclass(frozen=True)
class Task:
    """Clean training rows, test rows, and a model."""

    train: Any
    test: Rows
    classes: int
    epochs: int
    lr: float
    before: Any = None  # other clean rows, to start from a network trained on them

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        if isinstance(self.train, Tokens):
            return GPT2ForSequenceClassification(
                GPT2Config(
                    vocab_size=VOCABULARY,
                    n_positions=WORDS,
                    n_embd=48,
                    n_layer=LAYERS,
                    n_head=4,
                    num_labels=self.classes,
                    pad_token_id=0,
                    bos_token_id=None,
                    eos_token_id=None,
                    resid_pdrop=0.0,
                    embd_pdrop=0.0,
                    attn_pdrop=0.0,
                )
            )
        return ViTForImageClassification(
            ViTConfig(
                image_size=8,
                patch_size=2,
                num_channels=1,
                num_labels=self.classes,
                hidden_size=48,
                num_hidden_layers=LAYERS,
                num_attention_heads=4,
                intermediate_size=96,
            )
        )


VOCABULARY, WORDS = 2000, 24


def digits() -> Task:
    train = load_digits("train")
    rest = train.subset(range(500, len(train)))
    return Task(train.subset(range(500)), load_digits("test"), 10, 60, 2e-3, before=rest)


def emotion() -> Task:
    """Six emotions, words as tokens; EVERYDEPTH_DATA names the folder that holds `emotion/`."""
    root = Path(os.environ["EVERYDEPTH_DATA"]) / "emotion"
    lines: dict[str, list[tuple[str, str]]] = {}
    for split in ("train", "test"):
        path = next(root.glob(f"*{split}*.xz"))
        rows = lzma.decompress(path.read_bytes()).decode().splitlines()[1:]
        lines[split] = [tuple(row.rsplit(";", 1)) for row in rows]  # pyright: ignore[reportArgumentType]
    names = sorted({label for _, label in lines["train"]})
    words = Counter(w for text, _ in lines["train"] for w in re.findall(r"\w+", text))
    known = {w: i + 2 for i, (w, _) in enumerate(words.most_common(VOCABULARY - 2))}

    def tokens(part: list[tuple[str, str]]) -> Tokens:
        ids = torch.zeros(len(part), WORDS, dtype=torch.long)
        for row, (text, _) in enumerate(part):
            found = [known.get(w, 1) for w in re.findall(r"\w+", text)][:WORDS]
            ids[row, WORDS - len(found) :] = torch.tensor(found)
        labels = torch.tensor([names.index(label) for _, label in part])
        return Tokens(ids, (ids != 0).long(), labels=labels)

    return Task(tokens(lines["train"][:1000]), tokens(lines["test"][:1000]), 6, epochs=40, lr=2e-3)


def started(task: Task, seed: int, folder: Path) -> nn.Module:
    """A network trained on other, clean rows."""
    model: Any = task.build(seed)
    if not (folder / "model").is_dir():
        ed.fit(
            ed.EveryDepth(model, ed.end_to_end()),
            task.before,
            epochs=40,
            batch_size=50,
            lr=task.lr,
            seed=seed,
            run=folder,
            save_every=10**6,
            progress=False,
        )
    return type(model).from_pretrained(folder / "model")


def measured(task: Task, folder: Path, pretrained: bool) -> dict[str, Any]:
    """Seeds change the noise, the initial weights and the order of the data."""
    found: list[ed.Ablation] = []
    studies: list[ed.GradientStudy] = []
    after: list[ed.Ablation] = []
    for seed in SEEDS:
        noise = flip_labels(task.train.labels, NOISE, classes=task.classes, seed=seed)
        noisy = replace(task.train, labels=noise.labels)

        def train(
            model: nn.Module, path: Path | None, seed: int, noisy: Rows = noisy
        ) -> ed.FitResult:
            net = ed.EveryDepth(model, ed.end_to_end())
            return ed.fit(
                net,
                noisy,
                epochs=task.epochs,
                batch_size=50,
                lr=task.lr,
                seed=seed,
                run=path,
                resume=True,
                keep=1,
                save_every=10**6,  # cells are short: a broken one starts again
                callbacks=[UntilAccuracy(noisy)],
                progress=False,
            )

        found.append(
            ed.ablate(
                started(task, seed, folder / f"start-{seed}") if pretrained else task.build,
                task.test,
                c=(0.0, 1.0),
                train=train,
                seeds=(seed,),
                run=folder / str(seed),
                noisy=noisy,
                flipped=noise,
            )
        )
        print(f"seed {seed}\n{found[-1].table()}\n{found[-1].table('memorization')}", flush=True)
        untouched = folder / str(seed) / "cells" / f"untouched-seed-{seed}" / "training" / "model"
        model = type(task.build(seed)).from_pretrained(untouched).eval()
        studies.append(ed.gradient_study(model, task.test, noisy, flipped=noise, progress=False))
        after.append(ed.ablate(model, task.test, progress=False))
        print(studies[-1].table(), flush=True)
    return summary(found, studies, after)


def spread(values: Any) -> dict[str, Any]:
    low, high = interval(values)
    return {
        "runs": [round(float(v), 4) for v in values],
        "mean": float(np.mean(values)),
        "interval": [low, high],
    }


def summary(
    found: list[ed.Ablation],
    studies: list[ed.GradientStudy],
    after: list[ed.Ablation],
) -> dict[str, Any]:
    def untouched(name: str) -> np.ndarray:
        return np.array([a.untouched[name][0] for a in found])

    def removed(name: str) -> np.ndarray:
        return np.array([a.at(name, 0.0) for a in found])  # (seed, layer)

    layers = found[0].layers
    ratio = np.array([s.smaller for s in studies])
    learning = np.array([s.learning.norm for s in studies])
    views = [ed.unified_view(s, a) for s, a in zip(studies, after, strict=True)]
    trained = [
        ed.ablations.spearman(s.learning.norm, a.at("accuracy", 0.0))
        for s, a in zip(studies, found, strict=True)
    ]
    names = ("memorization", "train_accuracy", "reached", "accuracy", "margin")
    return {
        "untouched": {name: spread(untouched(name)) for name in names},
        "removed": {
            str(layer): {
                **{name: spread(removed(name)[:, i]) for name in names},
                "accuracy_drop": spread(untouched("accuracy") - removed("accuracy")[:, i]),
                "memorization_drop": spread(
                    untouched("memorization") - removed("memorization")[:, i]
                ),
            }
            for i, layer in enumerate(layers)
        },
        "early_minus_late_drop": spread(
            (untouched("accuracy")[:, None] - removed("accuracy"))[:, 0]
            - (untouched("accuracy")[:, None] - removed("accuracy"))[:, -1]
        ),
        "gradient_ratio": {str(n): spread(ratio[:, i]) for i, n in enumerate(layers)},
        "learning_norm": {str(n): spread(learning[:, i]) for i, n in enumerate(layers)},
        "error": {
            "learning": spread([s.learning.error.mean() for s in studies]),
            "memorization": spread([s.memorization.error.mean() for s in studies]),
        },
        "bound_violations": {
            form: [
                {
                    tap: [round(float(v), 4) for v in share]
                    for tap, share in (s.learning.violations(form) or {}).items()
                }
                for s in studies
            ]
            for form in ("corrected", "as_printed", "repaired")
        },
        "bound_is_ordered": [s.bound_is_ordered for s in studies],
        "log10_bound_over_norm": {
            tap: [
                round(float(v), 2)
                for v in np.mean(
                    [
                        (s.learning.bounds["repaired"][tap] - np.log10(s.learning.norms[tap])).mean(
                            1
                        )
                        for s in studies
                        if s.learning.bounds
                    ],
                    0,
                )
            ]
            for tap in studies[0].learning.norms
        },
        "after_training": {
            str(n): spread([a.at("accuracy", 0.0)[i] for a in after]) for i, n in enumerate(layers)
        },
        "spearman_after": {
            pair: spread([v.spearman[pair] for v in views]) for pair in views[0].spearman
        },
        "spearman_trained_norm_accuracy": spread(trained),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("digits", "emotion"))
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--run", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    task = {"digits": digits, "emotion": emotion}[chosen.task]()
    folder = chosen.run or Path(tempfile.mkdtemp())
    figures = measured(task, folder, chosen.pretrained)
    setting = {
        "noise": NOISE,
        "layers": LAYERS,
        "seeds": list(SEEDS),
        "rows": len(task.train),
        "test_rows": len(task.test),
        "epochs_at_most": task.epochs,
        "pretrained": chosen.pretrained,
    }
    name = f"memorization_{chosen.task}{'_pretrained' if chosen.pretrained else ''}"
    record(name, {"setting": setting, **figures})


if __name__ == "__main__":
    main()
