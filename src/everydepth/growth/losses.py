"""The loss of every row: what growth differentiates, compares and bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from everydepth.data.feeding import Feed
from everydepth.errors import LabelError, NonFiniteError, SettingError
from everydepth.stream import IGNORE_INDEX, ResidualStream, as_stream, evaluating, unwrapped

Criterion = Callable[[Tensor, Any, Mapping[str, Any]], Tensor]
"""A loss of your own: `f(prediction, labels, batch)` gives one number a row."""


def row_losses(
    stream: ResidualStream,
    prediction: Tensor,
    batch: Mapping[str, Any],
    criterion: Criterion | None = None,
) -> tuple[Tensor, Tensor]:
    """Per row the sum of the losses of its labels, and how many labels it has."""
    labels, rows = batch.get("labels"), stream.rows(batch)
    if labels is None:
        raise LabelError(f"the batch has keys {sorted(batch)} and no 'labels'; growth needs a loss")
    wide = prediction.float() if prediction.dtype in (torch.float16, torch.bfloat16) else prediction
    if criterion is not None:
        losses = criterion(wide, labels, batch)
        if losses.shape != (rows,):
            raise SettingError(
                f"criterion gave shape {tuple(losses.shape)}, but there are {rows} rows; "
                "return one number a row"
            )
        return losses, torch.ones_like(losses)
    if stream.task in ("detection", "embedding"):
        raise SettingError(
            f"{stream.name} does {stream.task}, for which there is no built-in loss; "
            "pass criterion=f(prediction, labels, batch) that gives one number a row"
        )
    if stream.task == "regression" or labels.is_floating_point():
        gap = wide.reshape(rows, -1) - labels.reshape(rows, -1).to(wide.dtype)
        return gap.square().mean(1), torch.ones_like(gap[:, 0])
    stream.check_labels(labels)
    if stream.task in ("causal_lm", "masked_lm"):
        mask = batch.get("attention_mask")
        if mask is not None and mask.shape == labels.shape:
            labels = labels.masked_fill(mask == 0, IGNORE_INDEX)
        if stream.task == "causal_lm":
            wide, labels = wide[:, :-1], labels[:, 1:]
    flat = F.cross_entropy(
        wide.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=IGNORE_INDEX
    )
    counts = (labels != IGNORE_INDEX).to(flat.dtype).reshape(rows, -1).sum(1)
    return flat.reshape(rows, -1).sum(1), counts


@torch.no_grad()
def losses_of(
    model: nn.Module | ResidualStream,
    data: Any,
    *,
    criterion: Criterion | None = None,
    batch_size: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Row losses and counts over all data, in eval mode, in float64."""
    stream = as_stream(model, **options)
    feed = data if isinstance(data, Feed) else Feed(data, stream, batch_size=batch_size)
    sums: list[Tensor] = []
    counts: list[Tensor] = []
    with evaluating(unwrapped(stream.model)):
        for batch in feed:
            output = stream.call(stream.arguments(batch, None))
            loss, count = row_losses(stream, stream.prediction(output), batch, criterion)
            sums.append(loss.double().cpu())
            counts.append(count.double().cpu())
    return torch.cat(sums), torch.cat(counts)


def mean_loss(model: nn.Module | ResidualStream, data: Any, **settings: Any) -> float:
    """The mean loss over all labels, in eval mode."""
    sums, counts = losses_of(model, data, **settings)
    return float(sums.sum() / counts.sum())


def check_finite(value: Tensor, what: str, depth: int) -> None:
    if not bool(torch.isfinite(value).all()):
        raise NonFiniteError(
            f"{what} at depth {depth} has NaN or infinity; look at the inputs and labels, or train "
            "with a lower learning rate before growing",
            depth,
        )
