"""Do skips carry memorization? Trained from nothing, one network for each removed layer, on digits.

python benchmarks/memorization.py [--run DIR]

The recipes of Residual Relay start, as the paper does, from trained networks; this is the
counterpart without. Finished cells in DIR are not trained again. Nothing was tuned but the
learning rate, once, so that the untouched model fits most of the noise.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import record, sized
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

import everydepth as ed
from everydepth.ablations import Ablation, GradientStudy
from everydepth.data import Rows, flip_labels, load_digits
from everydepth.training import FitResult, UntilAccuracy
from everydepth_papers.bound import FORMS, TAPS, Bounded, bounded
from everydepth_papers.statistics import interval, spearman
from everydepth_papers.unified import unified_view

NOISE, LAYERS, SEEDS = 0.05, sized(4, 2), sized((0, 1, 2), (0, 1))


@dataclass(frozen=True)
class Task:
    """Clean training rows, test rows, and a model."""

    train: Any
    test: Rows
    epochs: int
    lr: float

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        config = ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            num_labels=10,
            hidden_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            intermediate_size=96,
        )
        return ViTForImageClassification(config)


def digits() -> Task:
    rows, epochs = sized((500, 60), (60, 1))
    test = load_digits("test")
    return Task(
        load_digits("train").subset(range(rows)),
        sized(test, test.subset(range(20))),
        epochs,
        2e-3,
    )


def measured(task: Task, folder: Path) -> dict[str, Any]:
    """Seeds change the noise, the initial weights and the order of the data."""
    found: list[Ablation] = []
    studies: list[GradientStudy] = []
    after: list[Ablation] = []
    bounds: list[Bounded] = []
    for seed in SEEDS:
        noise = flip_labels(task.train.labels, NOISE, classes=10, seed=seed)
        noisy = replace(task.train, labels=noise.labels)

        def train(model: nn.Module, path: Path | None, seed: int, noisy: Rows = noisy) -> FitResult:
            net = ed.EveryDepth(model, ed.end_to_end())
            return ed.fit(
                net,
                noisy,
                epochs=task.epochs,
                batch_size=50,
                lr=task.lr,
                seed=seed,
                run=path,
                resume=path is not None,
                keep=1,
                save_every=10**6,  # cells are short: a broken one starts again
                callbacks=[UntilAccuracy(noisy)],
                progress=False,
            )

        found.append(
            ed.ablate(
                task.build,
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
        model = task.build(seed)  # the untouched cell again: cells keep figures, not models
        train(model, None, seed)
        model.eval()
        studies.append(ed.gradient_study(model, task.test, noisy, flipped=noise, progress=False))
        after.append(ed.ablate(model, task.test, progress=False))
        bounds.append(bounded(model, task.test))
        print(studies[-1].table(), flush=True)
    return summary(found, studies, after, bounds)


def spread(values: Any) -> dict[str, Any]:
    low, high = interval(values)
    return {
        "runs": [round(float(v), 4) for v in values],
        "mean": float(np.mean(values)),
        "interval": [low, high],
    }


def summary(
    found: list[Ablation],
    studies: list[GradientStudy],
    after: list[Ablation],
    bounds: list[Bounded],
) -> dict[str, Any]:
    def untouched(name: str) -> np.ndarray:
        return np.array([a.untouched[name][0] for a in found])

    def removed(name: str) -> np.ndarray:
        return np.array([a.at(name, 0.0) for a in found])  # (seed, layer)

    layers = found[0].layers
    ratio = np.array([s.smaller for s in studies])
    learning = np.array([s.learning.norm for s in studies])
    views = [unified_view(s, a) for s, a in zip(studies, after, strict=True)]
    trained = [
        spearman(s.learning.norm, a.at("accuracy", 0.0))
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
                    for tap, share in bound.violations(form).items()
                }
                for bound in bounds
            ]
            for form in FORMS
        },
        "bound_is_ordered": [bound.is_ordered for bound in bounds],
        "log10_bound_over_norm": {
            tap: [
                round(float(v), 2)
                for v in np.mean(
                    [(b.bounds["repaired"][tap] - b.norms[tap]).mean(1) for b in bounds], 0
                )
            ]
            for tap in TAPS
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
    parser.add_argument("--run", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    task = digits()
    figures = measured(task, chosen.run or Path(tempfile.mkdtemp()))
    setting = {
        "noise": NOISE,
        "layers": LAYERS,
        "seeds": list(SEEDS),
        "rows": len(task.train),
        "test_rows": len(task.test),
        "epochs_at_most": task.epochs,
    }
    record("memorization_digits", {"setting": setting, **figures})


if __name__ == "__main__":
    main()
