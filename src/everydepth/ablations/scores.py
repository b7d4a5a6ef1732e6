"""What a prediction is worth: loss, hit, margin and decision of every row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from everydepth.errors import SettingError
from everydepth.stream import IGNORE_INDEX, ResidualStream, labels_of


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The predictions of one batch that count, in rows.

    A row is a sample, or, where every token predicts, a token that has a target.
    rows: numbers of these predictions among all, flattened; None for all in order.
    labels: `(n,)` classes or `(n, outputs)` numbers; None if there are none.
    sample: `(n,)`, which row of the batch each belongs to.
    """

    rows: Tensor | None
    labels: Tensor | None
    sample: Tensor
    samples: int

    @classmethod
    def of(cls, stream: ResidualStream, batch: Mapping[str, Any], logits: Tensor) -> Targets:
        count = logits.shape[0]
        each = torch.arange(count, device=logits.device)
        labels = labels_of(stream, batch)
        if labels is None or stream.task == "detection":
            every = each.repeat_interleave(logits[..., 0].numel() // count)
            return cls(rows=None, labels=None, sample=every, samples=count)
        if stream.task == "regression":
            return cls(rows=None, labels=labels.reshape(count, -1), sample=each, samples=count)
        if logits.ndim == 3:
            mask = batch.get("attention_mask")
            if isinstance(mask, Tensor) and mask.shape == labels.shape:
                labels = labels.masked_fill(mask == 0, IGNORE_INDEX)
            if stream.task == "causal_lm":
                labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
            each = each[:, None].expand(labels.shape)
        flat = labels.flatten()
        rows = (flat != IGNORE_INDEX).nonzero().flatten()
        return cls(rows=rows, labels=flat[rows], sample=each.flatten()[rows], samples=count)

    def pick(self, logits: Tensor) -> Tensor:
        """`(n, classes)` in float32, or float64 where the model is."""
        z = logits if logits.dtype == torch.float64 else logits.float()
        z = z.flatten(0, -2)
        return z if self.rows is None else z[self.rows]

    def losses(self, z: Tensor) -> Tensor:
        """The loss of every row."""
        if self.labels is None:
            raise SettingError("a loss needs labels; pass batches with 'labels'")
        if self.labels.ndim == 2:
            return (z - self.labels.to(z.dtype)).square().mean(-1)
        return F.cross_entropy(z, self.labels, reduction="none")

    def sample_hits(self, z: Tensor) -> Tensor:
        """Whether *all* targets of a sample are the most likely ones.

        For a causal language model: whether greedy decoding writes them.
        """
        if self.labels is None or self.labels.ndim == 2:
            raise SettingError("whether a label is predicted needs class labels")
        right = (z.argmax(-1) == self.labels).to(torch.int64)
        wrong = torch.zeros(self.samples, dtype=torch.int64, device=z.device)
        wrong = wrong.index_add(0, self.sample, 1 - right)
        seen = torch.bincount(self.sample, minlength=self.samples) > 0
        return (wrong == 0) & seen


def margins(z: Tensor) -> Tensor:
    """Top-1 minus top-2 logit of every row (SPEC 3.6)."""
    first, second = z.topk(2, -1).values.unbind(-1)
    return first - second


def check_predicts_classes(stream: ResidualStream, what: str) -> None:
    if stream.task in ("regression", "embedding", "detection"):
        raise SettingError(
            f"{what} needs a class or a token to predict, but {stream.name} does {stream.task}; "
            "use a classifier or a language model"
        )
