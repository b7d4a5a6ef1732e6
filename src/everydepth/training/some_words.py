"""A sample of a large vocabulary, for cheaper distillation."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

LIKELY = 7 / 8  # share of the most likely words; the others are sampled from the rest
ROWS = 256  # rows whose logits are in memory at once


def some_words(
    teacher: Float[Tensor, "token dim"],
    weight: Float[Tensor, "classes dim"],
    bias: Float[Tensor, " classes"] | None,
    count: int,
    random: np.random.Generator,
) -> tuple[Float[Tensor, "words dim"], Float[Tensor, " words"] | None]:
    """Weight and bias of a smaller head: the classes a teacher finds most likely in these rows,
    and a sample of the others, `count` in total.

    A sampled class stands for many: its bias is raised by the logarithm of their number, so that
    sums of exponentials are correct on average.
    """
    classes = weight.shape[0]
    if count >= classes:
        return weight, bias
    with torch.no_grad():
        chances = weight.new_zeros(classes, dtype=torch.float32)
        for rows in teacher.split(ROWS):
            chances += linear(rows, weight, bias).float().softmax(-1).sum(0)
        order = chances.argsort(descending=True)
        likely = int(LIKELY * count)
        drawn = random.choice(classes - likely, count - likely, replace=False)
        rest = order[likely + torch.from_numpy(drawn).to(order.device)]
        offset = weight.new_zeros(count)
        offset[likely:] = math.log((classes - likely) / len(rest))
    words = torch.cat([order[:likely], rest])
    return weight[words], offset if bias is None else bias[words] + offset
