"""A part of a large vocabulary that stands for all of it."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

LIKELY = 7 / 8  # of the words; the others are drawn from the rest
ROWS = 256  # whose logits are alive at once


def some_words(
    teacher: Float[Tensor, "token dim"],
    weight: Float[Tensor, "classes dim"],
    bias: Float[Tensor, " classes"] | None,
    count: int,
    random: np.random.Generator,
) -> tuple[Float[Tensor, "words dim"], Float[Tensor, " words"] | None]:
    """A smaller head: `count` classes, most of them those a teacher finds likely in these rows.

    A drawn class stands for many: its bias is raised by the logarithm of how many, so that sums of
    exponentials are right on average.
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
