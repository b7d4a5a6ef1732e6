"""The README's figure: accuracy at each depth of the demo's ViT, end-to-end against LPA.

    python benchmarks/digits.py [seeds]

Trains the demo's network with each objective and seed, and writes benchmarks/results/digits.json
and docs/assets/depth-accuracy.png.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import matplotlib as mpl
import numpy as np
from record import RESULTS, SMOKE, record, sized

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import demo  # noqa: E402 (the demo is a script beside us, not a package)
import torch  # noqa: E402

import everydepth as ed  # noqa: E402
from everydepth.data import load_digits  # noqa: E402

FIGURE = sized(ROOT / "docs" / "assets", RESULTS) / "depth-accuracy.png"
# Okabe-Ito: told apart by everybody, and in print.
COLOURS = {"end-to-end": "#d55e00", "LPA": "#0072b2"}


def draw(accuracy: dict[str, np.ndarray]) -> None:
    mpl.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import PercentFormatter

    figure, axes = plt.subplots(figsize=(6.4, 3.2), dpi=200, layout="constrained")
    for name, runs in accuracy.items():
        mean, depths = runs.mean(0), np.arange(runs.shape[1])
        axes.plot(depths, mean, "o-", color=COLOURS[name], label=name)
        axes.fill_between(depths, runs.min(0), runs.max(0), color=COLOURS[name], alpha=0.15)
    axes.set_xlabel("depth at which the network is read out (blocks)")
    axes.set_ylabel("accuracy on held-out digits")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE)


def main(seeds: int = sized(3, 1)) -> None:
    if SMOKE:
        demo.EPOCHS, demo.CONFIG.num_hidden_layers = 1, 2
    torch.set_num_threads(1)
    begin, test = time.process_time(), load_digits("test")
    accuracy = {
        name: np.array(
            [
                ed.trace(demo.train(objective, seed=seed), test, ["accuracy"])["accuracy"]
                for seed in range(seeds)
            ]
        )
        for name, objective in {"end-to-end": ed.end_to_end(), "LPA": ed.lpa()}.items()
    }
    figures = {name: runs.round(4).tolist() for name, runs in accuracy.items()}
    cost = {"cpu_seconds": round(time.process_time() - begin), "seeds": seeds}
    record("digits", {**cost, "accuracy_per_depth_and_seed": figures})
    draw(accuracy)
    print(figures)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
