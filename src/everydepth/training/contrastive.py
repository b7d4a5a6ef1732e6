"""A loss for embeddings: rows of one group belong together, all others in the batch apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from everydepth.errors import LabelError, SettingError
from everydepth.stream import Criterion


def contrastive(scale: float = 20.0) -> Criterion:
    """A criterion for `EveryDepth(..., criterion=contrastive(), task="embedding")`.

    The labels are group numbers, one per row: a sentence and its paraphrase share one. A row's
    loss is `-log(sum_p exp(s cos) / sum_o exp(s cos))`, p over the other rows of its group and o
    over all other rows of the batch; a row that is alone in its group has a loss of 0.

    scale: `s`, the inverse of a temperature.

    >>> import torch
    >>> from everydepth.training import contrastive
    >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    >>> pairs, crossed = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    >>> loss = contrastive()
    >>> bool(loss(z, pairs, {}).mean() < 0.01 < loss(z, crossed, {}).mean())
    True
    """
    if not 0 < scale < float("inf"):
        raise SettingError(f"scale={scale}; use a number above 0")

    def loss(prediction: Tensor, labels: Any, _: Mapping[str, Any]) -> Tensor:
        rows = len(prediction)
        if not isinstance(labels, Tensor) or labels.shape != (rows,):
            shape = tuple(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
            raise LabelError(
                f"labels are {shape}, but contrastive needs the number of its group for each of "
                f"the {rows} rows; give a tensor of {rows} whole numbers"
            )
        z = F.normalize(prediction, dim=-1)
        itself = torch.eye(rows, dtype=torch.bool, device=z.device)
        near = (scale * z @ z.T).masked_fill(itself, -torch.inf)
        same = (labels[:, None] == labels[None, :]) & ~itself
        alone = ~same.any(1)
        # A row without a partner is given all others as its group: a loss of exactly 0.
        group = near.masked_fill(~(same | alone[:, None]), -torch.inf)
        if rows == 1:
            return prediction.sum(1) * 0
        return near.logsumexp(1) - group.logsumexp(1)

    return loss
