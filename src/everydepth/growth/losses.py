"""Per-row losses, which growth differentiates, compares and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from everydepth.errors import NonFiniteError
from everydepth.stream import (
    Criterion,
    ResidualStream,
    Targets,
    as_stream,
    evaluating,
    no_labels,
)
from everydepth.stream.feed import Feed


def row_losses(
    stream: ResidualStream,
    prediction: Tensor,
    batch: Mapping[str, Any],
    criterion: Criterion | None = None,
    extras: Mapping[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """For each sample, the weighted sum of its labels' losses and the sum of their weights.

    extras: model outputs other than the logits, for a criterion.
    """
    targets = Targets.of(stream, batch, criterion=criterion)
    losses = targets.losses(targets.pick(prediction), extras)
    return targets.sample_sums(losses * targets.weights.to(losses)), targets.sample_weights


def beside(output: Any) -> Mapping[str, Any]:
    """A model's outputs by name, if it names them."""
    return cast(Mapping[str, Any], output) if isinstance(output, Mapping) else {}


@torch.no_grad()
def losses_of(
    model: nn.Module | ResidualStream,
    data: Any,
    *,
    criterion: Criterion | None = None,
    batch_size: int | None = None,
    strict: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Row losses and counts over all data, in eval mode, in float64.

    strict: raise an error that names the first depth whose predictions are not finite.
    """
    stream = as_stream(model, **options)
    feed = data if isinstance(data, Feed) else Feed(data, stream, batch_size=batch_size)
    sums: list[Tensor] = []
    counts: list[Tensor] = []
    with evaluating(stream):
        for batch in feed:
            output = stream.called(batch)
            logits = stream.prediction(output)
            loss, count = row_losses(stream, logits, batch, criterion, beside(output))
            if strict and not bool(torch.isfinite(loss).all()):
                stream.observe(batch).check_predictions()
            sums.append(loss.double().cpu())
            counts.append(count.double().cpu())
    return torch.cat(sums), torch.cat(counts)


def mean_loss(model: nn.Module | ResidualStream, data: Any, **settings: Any) -> float:
    """The mean loss over all labels, in eval mode."""
    sums, counts = losses_of(model, data, **settings)
    return mean_of(float(sums.sum()), float(counts.sum()))


def mean_of(total: float, labels: float) -> float:
    """A sum of losses over the number of labels; an error if there are none."""
    if not labels:
        raise no_labels()
    return total / labels


def check_finite(value: Tensor, what: str, depth: int) -> None:
    if not bool(torch.isfinite(value).all()):
        raise NonFiniteError(
            f"{what} at depth {depth} has NaN or infinity; check the inputs and labels, or train "
            "with a lower learning rate before growing",
            depth,
        )
