"""What a prediction is worth beside its loss: the margin of every row."""

from __future__ import annotations

from torch import Tensor

from everydepth.errors import SettingError
from everydepth.stream import ResidualStream


def margins(z: Tensor) -> Tensor:
    """Top-1 minus top-2 logit of every row."""
    first, second = z.topk(2, -1).values.unbind(-1)
    return first - second


def check_predicts_classes(stream: ResidualStream, what: str) -> None:
    if stream.task in ("regression", "embedding", "detection"):
        raise SettingError(
            f"{what} needs a class or a token to predict, but {stream.name} does {stream.task}; "
            "use a classifier or a language model"
        )
