"""What is to be predicted: which rows of a prediction count, their labels, and how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from everydepth.errors import LabelError
from everydepth.stream import IGNORE_INDEX, ResidualStream


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The labels of one batch, ignored ones left out.

    labels: `(n,)` classes, `(n, classes)` shares of classes, or `(n, outputs)` numbers.
    rows: which of the flattened predictions they belong to; None for all, in order.
    scale: `(n,)`, the weight of each label over the sum of weights: `loss = sum scale * loss_row`.
    numbers: squared error instead of cross-entropy.
    """

    labels: Tensor
    rows: Tensor | None
    scale: Tensor
    numbers: bool = False
    class_weights: Tensor | None = None
    label_smoothing: float = 0.0

    @classmethod
    def of(
        cls,
        stream: ResidualStream,
        batch: Mapping[str, Any],
        labels: Tensor,
        *,
        loss_weights: Tensor | None = None,
        items: Tensor | int | None = None,
        class_weights: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> Targets:
        """From a batch's labels; `items` replaces the sum of weights (gradient accumulation)."""
        head = next(stream.head.parameters(), None)
        wide = torch.float64 if head is not None and head.dtype == torch.float64 else torch.float32
        one_number = labels.is_floating_point() and (labels.ndim == 1 or labels.shape[-1] == 1)
        if stream.task == "regression" or one_number:
            labels = labels.reshape(labels.shape[0], -1)
            return cls(
                labels=labels,
                rows=None,
                scale=_shares(loss_weights, labels[:, 0], wide, items),
                numbers=True,
            )
        if labels.is_floating_point():
            labels = labels.flatten(0, -2)
            scale = _shares(loss_weights, labels[:, 0], wide, items)
            rows = None
        else:
            labels, loss_weights = _aligned(stream, batch, labels, loss_weights)
            flat = labels.flatten()
            rows = (flat != IGNORE_INDEX).nonzero().flatten()
            labels = flat[rows]
            if loss_weights is not None:
                loss_weights = loss_weights.flatten()[rows]
            scale = _shares(loss_weights, labels, wide, items, class_weights)
            rows = None if len(rows) == len(flat) else rows
        return cls(
            labels=labels,
            rows=rows,
            scale=scale,
            class_weights=class_weights,
            label_smoothing=label_smoothing,
        )

    @property
    def can_be_chunked(self) -> bool:
        """Whether the loss is a weighted sum of cross-entropies of single classes."""
        weighs_all_classes = self.class_weights is not None and self.label_smoothing > 0
        return self.labels.ndim == 1 and not weighs_all_classes

    @property
    def row_weights(self) -> Tensor:
        """`scale`, with the class weights."""
        if self.class_weights is None:
            return self.scale
        return self.scale * self.class_weights[self.labels]

    def pick(self, x: Tensor) -> Tensor:
        """The rows of a feature or a prediction that have a label: `(n, dim)`."""
        x = x.flatten(0, -2)
        return x if self.rows is None else x.index_select(0, self.rows)

    def loss(self, logits: Tensor) -> Tensor:
        """The loss of picked predictions `(n, classes or outputs)`."""
        logits = at_least_float32(logits)
        if self.labels.ndim == 2 and logits.numel() != self.labels.numel():
            raise LabelError(
                f"labels have {self.labels.shape[1]} numbers a row, predictions "
                f"{logits.shape[-1]}; give as many, or one whole number (a class) a row"
            )
        if self.numbers:
            rows = (
                (logits.reshape(self.labels.shape) - self.labels.to(logits.dtype)).square().mean(1)
            )
        else:
            rows = F.cross_entropy(
                logits,
                self.labels.to(logits.dtype) if self.labels.ndim == 2 else self.labels,
                weight=None if self.class_weights is None else self.class_weights.to(logits.dtype),
                reduction="none",
                label_smoothing=self.label_smoothing,
            )
        return (rows * self.scale.to(rows.dtype)).sum()


def at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _aligned(
    stream: ResidualStream, batch: Mapping[str, Any], labels: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Labels at the position that predicts them; padding and what has no successor is ignored."""
    if weights is not None and weights.shape != labels.shape:
        raise LabelError(
            f"loss_weights have shape {tuple(weights.shape)}, labels {tuple(labels.shape)}; "
            "give one weight a label"
        )
    if stream.task not in ("causal_lm", "masked_lm"):
        return labels, weights
    first = next(batch[key] for key in stream.inputs if batch.get(key) is not None)
    if labels.shape != first.shape[:2]:
        raise LabelError(
            f"labels have shape {tuple(labels.shape)}, but the batch has {tuple(first.shape[:2])} "
            f"rows and tokens; give one label a token ({IGNORE_INDEX} to ignore it), not shifted"
        )
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape == labels.shape:
        labels = labels.masked_fill(mask == 0, IGNORE_INDEX)
    if stream.task == "causal_lm":
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        weights = None if weights is None else F.pad(weights[:, 1:], (0, 1))
    return labels, weights


def _shares(
    weights: Tensor | None,
    like: Tensor,
    dtype: torch.dtype,
    items: Tensor | int | None,
    class_weights: Tensor | None = None,
) -> Tensor:
    """One number a label, which sum to 1 (with class weights, once these are multiplied in)."""
    size = like.shape[0]
    w = torch.ones(size, device=like.device, dtype=dtype) if weights is None else weights.to(dtype)
    if w.shape != (size,):
        raise LabelError(f"loss_weights have shape {tuple(w.shape)}, but there are {size} labels")
    if items is not None:
        return w / items
    total = (w if class_weights is None else w * class_weights[like]).sum()
    # Nothing to learn from: a loss of 0, rather than 0/0.
    return w / torch.where(total > 0, total, torch.ones_like(total))
