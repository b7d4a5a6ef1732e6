"""Sequence-to-sequence maps on a cube, to be approximated by one transformer layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from everydepth.errors import SettingError

Context = Literal["self", "mean", "all"]
"""What the output at a token depends on: the token; it and the mean of the others; everything."""


@dataclass(frozen=True, kw_only=True)
class Domain:
    """All sequences of `tokens` tokens of `dim` numbers in low..high: a compact cube."""

    tokens: int
    dim: int = 1
    low: float | int = 0.0
    high: float | int = 1.0

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.dim < 1 or not self.low < self.high:
            raise SettingError(
                f"a domain of {self.tokens} tokens of {self.dim} numbers in {self.low}.."
                f"{self.high}; use 1 or more of each, and low < high"
            )

    @property
    def variables(self) -> int:
        return self.tokens * self.dim


@dataclass(frozen=True, kw_only=True)
class SequenceMap:
    """A continuous map `(batch, token, dim) -> (batch, token, outputs)`.

    context: what a token's output depends on; "all" is always right, the others need less.
    shifts: moving every token around the circle moves the outputs with them, so that one function
        of (own token, the following, ...) serves every position. True for every permutation-
        equivariant map. Where it is False the layer needs positions not only to read but to answer.
    """

    name: str
    description: str
    domain: Domain
    function: Callable[[Tensor], Tensor]
    context: Context = "all"
    shifts: bool = False

    def __call__(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token outputs"]:
        return self.function(x)


def _prefix(x: Tensor) -> Tensor:
    count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)[:, None]
    return torch.sin(math.pi * x.cumsum(1) / count)


def _places(x: Tensor) -> Tensor:
    place = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)[:, None]
    return torch.cos(math.pi * place * x)


def _contrast(x: Tensor) -> Tensor:
    others = (x.sum(1, keepdim=True) - x) / (x.shape[1] - 1)
    return torch.tanh(4 * (x - others))


def _turn(x: Tensor) -> Tensor:
    angle, length = math.pi * x[..., 0], x[..., 1]
    return torch.stack([length * torch.cos(angle), length * torch.sin(angle)], -1)


_ALL = (
    SequenceMap(
        name="wave",
        description="position-wise: sin(2 pi x_i); permutation-equivariant",
        domain=Domain(tokens=3),
        function=lambda x: torch.sin(2 * math.pi * x),
        context="self",
        shifts=True,
    ),
    SequenceMap(
        name="turn",
        description="position-wise on pairs (angle, length): polar to Cartesian",
        domain=Domain(tokens=2, dim=2),
        function=_turn,
        context="self",
        shifts=True,
    ),
    SequenceMap(
        name="places",
        description="position-wise but different at every position: cos(pi i x_i)",
        domain=Domain(tokens=3),
        function=_places,
        context="self",
    ),
    SequenceMap(
        name="contrast",
        description="mixing: tanh of 4 (x_i - mean of the others); permutation-equivariant",
        domain=Domain(tokens=4),
        function=_contrast,
        context="mean",
        shifts=True,
    ),
    SequenceMap(
        name="soft_lookup",
        description="mixing: sum_j softmax_j(4 x_i x_j) x_j; permutation-equivariant",
        domain=Domain(tokens=3),
        function=lambda x: torch.softmax(4 * x @ x.mT, -1) @ x,
        shifts=True,
    ),
    SequenceMap(
        name="neighbors",
        description="mixing: x_i x_{i+1} around the circle; follows shifts, not permutations",
        domain=Domain(tokens=3),
        function=lambda x: x * x.roll(-1, 1),
        shifts=True,
    ),
    SequenceMap(
        name="prefix",
        description="mixing: sin(pi mean of x_1..x_i); depends on the order",
        domain=Domain(tokens=3),
        function=_prefix,
    ),
    SequenceMap(
        name="sort",
        description="mixing: the i-th smallest token; not equivariant, not smooth",
        domain=Domain(tokens=2),
        function=lambda x: x.sort(1).values,
    ),
)

MAPS: Mapping[str, SequenceMap] = MappingProxyType({one.name: one for one in _ALL})
"""Maps to try, by name."""
