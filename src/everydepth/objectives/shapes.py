"""Shapes: how much the loss at each depth counts, before any schedule."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

import numpy as np

from everydepth.config import brief, setting
from everydepth.errors import SettingError
from everydepth.objectives.part import Part


@dataclass(frozen=True, kw_only=True)
class Shape(Part):
    """A weight for each depth."""

    order: ClassVar[int] = 0

    @abstractmethod
    def weights(self, depth: int) -> np.ndarray:
        """`w_0 .. w_L` for a network of L blocks, in float64; depth 0 is the embedding."""


@dataclass(frozen=True, kw_only=True)
class Last(Shape, name="last"):
    """1 at the last depth, 0 below."""

    def weights(self, depth: int) -> np.ndarray:
        w = np.zeros(depth + 1)
        w[-1] = 1.0
        return w


@dataclass(frozen=True, kw_only=True)
class LPA(Shape, name="lpa"):
    """`early` at depths 1..L-1 and `final` at L, or only at the last `top` depths.

    Progressive Approximation, Eq. 11.
    """

    early: float = setting(0.1, least=0, help="Weight below the last depth.")
    final: float = setting(1.0, least=0, help="Weight of the last depth.")
    top: int | None = setting(None, least=1, help="Supervise only the last N depths.")

    def weights(self, depth: int) -> np.ndarray:
        w = np.zeros(depth + 1)
        w[-1] = self.final
        w[1 if self.top is None else depth - self.top + 1 : -1] = self.early
        return w

    def check_depth(self, depth: int) -> None:
        if self.top is not None and self.top > depth:
            raise SettingError(
                f"top={self.top}, but the network has {depth} blocks; use 1 to {depth}"
            )


@dataclass(frozen=True, kw_only=True)
class Ladder(Shape, name="ladder"):
    """`early` at a few depths, the rungs, and `final` at the last depth."""

    depths: tuple[int, ...] | None = setting(
        None, help="The rungs; by default L/4, L/2, 3L/4 and L, rounded up."
    )
    early: float = setting(0.2, least=0, help="Weight of a rung below the last depth.")
    final: float = setting(1.0, least=0, help="Weight of the last depth.")

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.depths or ()
        twice = sorted({depth for depth in given if given.count(depth) > 1})
        if twice:
            raise SettingError(f"ladder: depths {list(given)} have {twice[0]} twice; give it once")
        if self.depths is not None and not given:
            raise SettingError("ladder: depths [] has no rung; give at least one, or None")

    def rungs(self, depth: int) -> tuple[int, ...]:
        """The supervised depths below the last."""
        quarters = {math.ceil(depth * quarter / 4) for quarter in (1, 2, 3)}
        found = quarters if self.depths is None else self.depths
        return tuple(rung for rung in sorted(found) if rung != depth)

    def weights(self, depth: int) -> np.ndarray:
        self.check_depth(depth)
        w = np.zeros(depth + 1)
        w[list(self.rungs(depth))] = self.early
        w[-1] = self.final
        return w

    def check_depth(self, depth: int) -> None:
        wrong = [rung for rung in self.depths or () if not 1 <= rung <= depth]
        if wrong:
            raise SettingError(
                f"ladder: depth {wrong[0]}, but the network has {depth} blocks; use 1 to {depth}"
            )


@dataclass(frozen=True, kw_only=True)
class Linear(Shape, name="linear"):
    """`2l / (L (L+1))`, which sums to 1 (Tracing Representations, Eq. 5)."""

    def weights(self, depth: int) -> np.ndarray:
        return 2 * np.arange(depth + 1, dtype=np.float64) / (depth * (depth + 1))


@dataclass(frozen=True, kw_only=True)
class Uniform(Shape, name="uniform"):
    """`1/L` at depths 1..L."""

    def weights(self, depth: int) -> np.ndarray:
        return np.where(np.arange(depth + 1) > 0, 1 / depth, 0.0)


@dataclass(frozen=True, kw_only=True)
class LayerSkip(Shape, name="layerskip"):
    """`scale * l(l-1)/2` below L, `L-1 + scale * (L-1)(L-2)/2` at L.

    The sums in LayerSkip's paper, which numbers layers 0..L-1.
    """

    scale: float = setting(0.2, least=0, help="How much depths below the last count.")

    def weights(self, depth: int) -> np.ndarray:
        l = np.arange(depth + 1, dtype=np.float64)  # noqa: E741 (the paper's name of a depth)
        w = self.scale * l * (l - 1) / 2
        w[-1] = max(depth - 1, 1) + self.scale * (depth - 1) * (depth - 2) / 2
        return w


@dataclass(frozen=True, kw_only=True)
class Given(Shape, name="given"):
    """Your own weights, one for each depth 0..L."""

    values: tuple[float, ...] = setting(help="One weight for each depth, from 0 to the last.")

    def __post_init__(self) -> None:
        given = self.values if isinstance(self.values, Sequence) else ()  # pyright: ignore[reportUnnecessaryIsInstance]  # not checked yet
        for depth, value in enumerate(given):
            if not (isinstance(value, Real) and 0 <= value < math.inf):
                raise SettingError(
                    f"the weight of depth {depth} is {brief(value)}; use a number of 0 or more"
                )
        super().__post_init__()
        if not any(self.values):
            raise SettingError(
                f"all {len(self.values)} weights are 0, so nothing would be trained; "
                "give at least one depth a weight above 0"
            )

    def weights(self, depth: int) -> np.ndarray:
        self.check_depth(depth)
        return np.array(self.values, dtype=np.float64)

    def check_depth(self, depth: int) -> None:
        if len(self.values) != depth + 1:
            raise SettingError(
                f"{len(self.values)} weights, but the network has {depth} blocks; "
                f"give {depth + 1}: one for each depth from 0 (the embedding) to {depth}"
            )
