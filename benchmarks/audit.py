"""Finding wrong labels: `ed.audit` beside cleanlab, on the same held-out models.

EVERYDEPTH_DATA=<folder with fashion-mnist/> python benchmarks/audit.py [lpa] [end_to_end]

A small ViT is trained for each of three folds (by default with LPA; `end_to_end` shows what the
depths are worth without it). Both tools judge each sample by the model that did not see it.
Average precision of the flipped labels, at 5 % and 20 % noise, three seeds. Needs cleanlab.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import RESULTS, SMOKE, record, sized
from sklearn.metrics import average_precision_score
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import ViTConfig, ViTForImageClassification

import everydepth as ed
from everydepth.ablations import folds
from everydepth.data import Images, flip_labels, load_digits
from everydepth_papers.statistics import interval

ROWS, FOLDS, EPOCHS, NOISES = sized(1800, 90), 3, sized(8, 1), (0.05, 0.20)
SEEDS = sized((3, 4, 5), (3, 4))  # 0 to 2 were looked at while the method was made
CONFIG = ViTConfig(
    image_size=28,
    patch_size=7,
    num_channels=1,
    num_labels=10,
    hidden_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=96,
)


def fashion(seed: int) -> Images:
    if SMOKE:
        few = load_digits("train").subset(range(ROWS))
        return replace(few, pixel_values=interpolate(few.pixel_values, (28, 28)))
    root = Path(os.environ["EVERYDEPTH_DATA"]) / "fashion-mnist"

    def read(name: str, offset: int) -> np.ndarray:
        path = next(root.glob(f"train-{name}*"))
        return np.frombuffer(gzip.open(path).read(), np.uint8, offset=offset)

    labels = torch.from_numpy(read("labels", 8).astype(np.int64))
    rows = np.random.default_rng(seed).permutation(len(labels))[:ROWS]
    pixels = torch.from_numpy(read("images", 16).reshape(-1, 1, 28, 28)[rows].astype(np.float32))
    return Images(pixels / 255 - 0.5, labels[rows], classes=tuple("0123456789"))


def trained(data: Images, objective: ed.Objective, seed: int) -> ViTForImageClassification:
    torch.manual_seed(seed)
    model = ViTForImageClassification(CONFIG)
    ed.fit(
        ed.EveryDepth(model, objective),
        data,
        epochs=EPOCHS,
        batch_size=50,
        lr=2e-3,
        seed=seed,
        progress=False,
    )
    return model.eval()


@torch.no_grad()
def probabilities(models: list[Any], data: Images, where: Tensor) -> np.ndarray:
    found = torch.zeros(len(data), 10)
    for k, model in enumerate(models):
        rows = (where == k).nonzero().flatten()
        found[rows] = model(pixel_values=data.pixel_values[rows]).logits.softmax(-1)
    return found.double().numpy()


def peers(truth: np.ndarray, labels: np.ndarray, p: np.ndarray) -> dict[str, float]:
    """Average precision of cleanlab's scores; nothing in a smoke run without it."""
    if SMOKE and importlib.util.find_spec("cleanlab") is None:
        return {}
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    found = {
        f"cleanlab {method}": float(
            average_precision_score(truth, -get_label_quality_scores(labels, p, method=method))
        )
        for method in ("self_confidence", "normalized_margin", "confidence_weighted_entropy")
    }
    # Confident learning: what it flags comes first, in its order; the rest by label quality.
    ranked = find_label_issues(labels, p, return_indices_ranked_by="normalized_margin", n_jobs=1)
    score = -get_label_quality_scores(labels, p, method="normalized_margin") - 10
    score[ranked] = np.arange(len(ranked), 0, -1)
    return {**found, "cleanlab confident learning": float(average_precision_score(truth, score))}


def compared(noise: float, seed: int, objective: ed.Objective) -> dict[str, float]:
    clean = fashion(seed)
    flips = flip_labels(clean.labels, noise, seed=seed)
    data = replace(clean, labels=flips.labels)
    where = folds(data.labels, FOLDS, seed)
    models = [trained(data.subset(where != k), objective, seed) for k in range(FOLDS)]
    truth = np.zeros(len(data))
    truth[flips.flipped] = 1
    labels, p = data.labels.numpy(), probabilities(models, data, where)
    p /= p.sum(1, keepdims=True)
    found = peers(truth, labels, p)
    report = ed.audit(models, data, folds=where, progress=False)
    found["audit"] = float(average_precision_score(truth, report.score))
    found["audit, held-out accuracy"] = float((p.argmax(1) == clean.labels.numpy()).mean())
    found["audit, estimated noise"] = float(report.noise or 0)
    found["audit, Brier score"] = float(np.mean((report.score - truth) ** 2))
    found["constant, Brier score"] = float(noise * (1 - noise))
    found["audit, mean score"] = float(report.score.mean())
    return found


def main() -> None:
    torch.set_num_threads(1)
    # Figures of the other objective stay: each can be measured in its own run.
    kept = RESULTS / "audit.json"
    figures: dict[str, Any] = (
        json.loads(kept.read_text())["average_precision"] if kept.exists() else {}
    )
    objectives = {"lpa": ed.lpa(), "end_to_end": ed.end_to_end()}
    for name in sys.argv[1:] or ["lpa"]:
        objective = objectives[name]
        for noise in NOISES:
            runs = [compared(noise, seed, objective) for seed in SEEDS]
            figures[f"{name}, {noise:.0%} noise"] = {
                key: {
                    "mean": float(np.mean([r[key] for r in runs])),
                    "interval": list(interval([r[key] for r in runs])),
                    "runs": [round(r[key], 4) for r in runs],
                }
                for key in runs[0]
            }
            for key, value in figures[f"{name}, {noise:.0%} noise"].items():
                print(f"{name:<11} {noise:.0%} {key:<40} {value['mean']:.4f} {value['runs']}")
            print(flush=True)
            setting = {"rows": ROWS, "folds": FOLDS, "epochs": EPOCHS, "seeds": list(SEEDS)}
            record("audit", {"setting": setting, "average_precision": figures})


if __name__ == "__main__":
    main()
