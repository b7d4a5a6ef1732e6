"""Zoo models with labels that have a gradient."""

from __future__ import annotations

import torch
from tests.zoo import ENTRIES, PAD
from torch import Tensor, nn

from everydepth.stream import as_stream


def labeled(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = ENTRIES[name].make(dtype)
    stream = as_stream(model)
    if stream.task == "causal_lm":
        pad = batch["input_ids"] == PAD
        batch["labels"] = batch["input_ids"].masked_fill(pad, -100)
        batch["labels"][:, 1:][pad[:, :-1]] = -100  # padding predicts nothing
    else:
        batch["labels"] = torch.randint(0, stream.classes, (len(next(iter(batch.values()))),))
    return model, batch
