"""Compute the prediction at a depth as cheaply as possible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from everydepth.errors import UnsupportedModelError
from everydepth.exits.policies import Memory, Policy
from everydepth.stream import ResidualStream, States
from everydepth.stream.states import are_finite


def exit_logits(
    stream: ResidualStream, h: Tensor, depth: int, batch: Mapping[str, Any]
) -> Float[Tensor, "rows classes"]:
    """The logits at a depth. Tokens are pooled first, so norm and head run on one, not on all.

    The last depth is read out in the model's own order, so that it equals the model's output.

    h: the readout's input (`exit_state`).
    """
    if depth == stream.depth:
        z = stream.readout(h, depth, batch)
    else:
        z = stream.head(stream.normed(stream.feature(h, depth, batch), depth))
    if z.ndim != 2:
        raise UnsupportedModelError(
            f"{stream.name} predicts a class per token, but early exit needs one class per sample; "
            "use one fixed depth: everydepth.at_depth(model, k)"
        )
    return z


def certainties(
    states: States, policy: Policy
) -> tuple[Float[Tensor, "rows places"], Int[Tensor, "rows depths"]]:
    """The certainty at depths 1..L-1, and the class at depths 1..L."""
    stream, memory = states.stream, Memory()
    scores: list[Tensor] = []
    classes: list[Tensor] = []
    finite: list[Tensor] = []
    for depth in range(1, stream.depth + 1):
        last = depth == stream.depth
        logits = (
            states.logits(depth)
            if last
            else exit_logits(stream, states.exit_state(depth), depth, states.batch)
        )
        if not last:
            score, memory = policy.certainty(logits, memory)
            scores.append(score)
        classes.append(logits.argmax(-1))
        finite.append(are_finite(logits))
    if not bool(torch.stack(finite).all()):
        states.check_predictions()
    empty = classes[0].new_zeros((len(classes[0]), 0), dtype=torch.float32)
    return torch.stack(scores, 1) if scores else empty, torch.stack(classes, 1)
