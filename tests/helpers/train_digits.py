"""A training in a process of its own, to be killed.

python train_digits.py RUN [key=value ...]     settings of fit, as JSON
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from tests.helpers.training import digits, vit

import everydepth as ed
from everydepth.training import Callback, Training


class Announce(Callback):
    """Tells the parent where the training is, so that it can choose its moment."""

    def on_step(self, training: Training) -> None:
        print(f"step {training.step}", flush=True)


def main(run: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    net = ed.EveryDepth(vit(), ed.lpa().annealed().sampled(1))
    settings: dict[str, Any] = {"batch_size": 16, "lr": 0.01, "clip": 1.0, "progress": False}
    result = ed.fit(
        net, digits(96), digits(40, "test"), run=run, callbacks=[Announce()], **(settings | options)
    )
    print(f"done {result.steps}", flush=True)


if __name__ == "__main__":
    pairs = (argument.partition("=") for argument in sys.argv[2:])
    main(sys.argv[1], {key: json.loads(value) for key, _, value in pairs})
