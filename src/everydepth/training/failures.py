"""Find where a NaN or infinity came from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from everydepth.errors import NonFiniteError
from everydepth.training.module import EveryDepth
from everydepth.training.processes import of_every_process

if TYPE_CHECKING:
    from everydepth.training.loop import Training


def not_finite(training: Training, batch: Mapping[str, Any]) -> NonFiniteError:
    """An error that names the first depth with a non-finite state, or else loss."""
    net = training.net
    first = next((d for d, v in sorted(training.losses.items()) if not math.isfinite(v)), None)
    with torch.no_grad(), training.autocast():
        in_states = training.called(measure=_first_non_finite, **batch)
    found = of_every_process((in_states, first), training.accelerator)
    states = [depth for depth, _ in found if depth is not None]
    losses = [depth for _, depth in found if depth is not None]
    last = net.stream.depth
    if states:
        depth = min(states)
        where = f"block {depth}" if depth else "the embedding"
        place = f"NaN or infinity first appears after {where} (depth {depth} of {last})"
    else:
        depth = min(losses, default=last)
        place = f"all states are finite, but not the loss at depth {depth} of {last}"
    return NonFiniteError(
        f"the loss became {training.loss} at step {training.step + 1}: {place}; "
        f"{training.what_is_kept()}. Check this batch, or use a lower learning rate, clip= or "
        "warmup=",
        depth,
    )


def _first_non_finite(net: EveryDepth, batch: Mapping[str, Any]) -> int | None:
    """The first depth whose state holds NaN or infinity; a `Measure`."""
    try:
        net.stream.observe(batch, check_finite=True)
    except NonFiniteError as error:
        return error.depth
    return None


def check_weights(training: Training, state: Mapping[str, Tensor]) -> None:
    """Raise an error rather than save a checkpoint with NaN or infinity."""
    for name, value in state.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise NonFiniteError(
                f"after step {training.step} the weight {name} holds NaN or infinity; "
                f"{training.what_is_kept()}. Use a lower learning rate, clip= or warmup=",
                training.net.stream.depth,
            )
