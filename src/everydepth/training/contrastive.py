"""A contrastive loss for embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from everydepth.config import Positive, checked
from everydepth.errors import LabelError
from everydepth.stream import Criterion


@checked
def contrastive(scale: Positive = 20.0) -> Criterion:
    """A criterion for `EveryDepth(..., criterion=contrastive(), task="embedding")`.

    Labels are group numbers, one per row: a sentence and its paraphrase share one. A row's loss is
    `-log(sum_p exp(s cos) / sum_o exp(s cos))`, where p are the other rows of its group and o all
    other rows of the batch; it is 0 for a row that is alone in its group.

    scale: `s`, the inverse temperature.

    >>> import torch
    >>> from everydepth.training import contrastive
    >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    >>> pairs, crossed = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    >>> loss = contrastive()
    >>> bool(loss(z, pairs, {}).mean() < 0.01 < loss(z, crossed, {}).mean())
    True
    """

    def loss(prediction: Tensor, labels: Any, _: Mapping[str, Any]) -> Tensor:
        rows = len(prediction)
        if not isinstance(labels, Tensor) or labels.shape != (rows,):
            shape = tuple(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
            raise LabelError(
                f"labels are {shape}, but contrastive needs a group number for each of the {rows} "
                f"rows; give a tensor of {rows} whole numbers"
            )
        if rows == 1:
            return prediction.sum(1) * 0
        z = F.normalize(prediction, dim=-1)
        itself = torch.eye(rows, dtype=torch.bool, device=z.device)
        similarity = (scale * z @ z.T).masked_fill(itself, -torch.inf)
        same = (labels[:, None] == labels[None, :]) & ~itself
        alone = ~same.any(1)
        # For a row that is alone, all others are its group: a loss of exactly 0.
        group = similarity.masked_fill(~(same | alone[:, None]), -torch.inf)
        return similarity.logsumexp(1) - group.logsumexp(1)

    return loss
