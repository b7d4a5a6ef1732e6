"""A callback for Hugging Face's Trainer, which takes an `EveryDepth` as its model.

`compute_metrics` gets the logits followed by the losses of every depth; with
`trainer.evaluate(ignore_keys=["losses", "regularizer"])`, the logits alone, as for the plain model.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from everydepth.training.module import EveryDepth


class DepthProgress(TrainerCallback):
    """Passes the Trainer's step to the objective, so that a curriculum continues after a resume.

    `Trainer(model=net, callbacks=[DepthProgress(net)], ...)`
    """

    def __init__(self, net: EveryDepth) -> None:
        self.net = net

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.net.set_progress(state.global_step, state.max_steps)
